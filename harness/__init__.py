"""What proves the product, shipped so that others can use it too."""
