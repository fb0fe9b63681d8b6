"""What of Megatron-Core the project relies on is as it was when it was read.

A failure here after an upgrade names what changed and where to look: read the new code beside the stand-in,
run the e2e suite, and then add the new fingerprint.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import optstream.core.megatron
from optstream.core.megatron_fingerprints import KNOWN, fingerprint
from optstream.harness.launch import run_ranks
from optstream.harness.training import Trainer
from optstream.harness.training_config import TrainingConfig

pytestmark = pytest.mark.e2e

CORE = Path(optstream.core.megatron.__file__).parent
# What the adapter's files call a DistributedOptimizer.
NAMES = {"megatron", "_megatron", "optimizer", "stub"}
OURS = {"_nvme_state_store"}
WHERE_TO_LOOK = "read its new code, then core/megatron.py, and add it to core/megatron_fingerprints.py"


def attributes_used() -> dict[str, set[str]]:
    """Of a DistributedOptimizer, the attributes that core/megatron*.py use, and the files that do."""
    used: dict[str, set[str]] = {}
    for path in sorted(CORE.glob("megatron*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
            if name in NAMES and node.attr not in OURS:
                used.setdefault(node.attr, set()).add(path.name)
    return used


@pytest.fixture(scope="module")
def optimizer():
    """A DistributedOptimizer of the installed release, as it is once built."""

    def build(rank: int):
        trainer = Trainer(TrainingConfig(layers=1, hidden=8, heads=2, seq=8, batch=1), rank=rank)
        (part,) = trainer.optimizer.chained_optimizers
        trainer.close()
        return part

    return run_ranks(build, 1)[0]


def test_the_adapter_uses_what_this_test_finds():
    used = attributes_used()
    assert {"buffers", "model_param_gbuf_map", "shard_fp32_from_float16_groups"} <= used.keys()
    assert used["buffers"] >= {"megatron_store.py"}
    assert used["shard_fp32_groups"] >= {"megatron_native_fp32.py"}


def test_every_attribute_that_the_adapter_uses_is_there(optimizer):
    missing = {name: sorted(files) for name, files in attributes_used().items() if not has(optimizer, name)}
    assert missing == {}, f"gone from DistributedOptimizer, with the files that use them; {WHERE_TO_LOOK}"


def has(optimizer, name: str) -> bool:
    # The inner torch optimizer is called `optimizer`, too.
    return hasattr(optimizer, name) or hasattr(optimizer.optimizer, name)


def test_every_method_that_the_adapter_uses_is_fingerprinted(optimizer):
    methods = {name for name in attributes_used() if inspect.isfunction(getattr(type(optimizer), name, None))}
    assert "_get_model_param_range_map" in methods
    assert sorted(methods - {method for _, method in KNOWN}) == []


@pytest.mark.parametrize(("owner", "method"), KNOWN, ids=".".join)
def test_a_method_is_one_that_was_read(optimizer, owner, method):
    (cls,) = [each for each in type(optimizer).__mro__ if each.__name__ == owner]
    assert method in vars(cls), f"{owner}.{method} is gone: {WHERE_TO_LOOK}"
    found = fingerprint(vars(cls)[method])
    assert found in KNOWN[owner, method], f"{owner}.{method} changed, to {found}: {WHERE_TO_LOOK}"
