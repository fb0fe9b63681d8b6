"""What the product is: planning, streaming and the optimizers that stream."""
