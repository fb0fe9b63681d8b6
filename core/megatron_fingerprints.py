"""Which code of Megatron-Core the adapter was made for, method by method.

The adapter stands in for some methods of Megatron's optimizers and relies on what others do. A release that
changes one of them may still run and train wrongly, so an unknown body is refused by name before training.
A fingerprint ignores comments, docstrings and formatting.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable

# (class, method) -> fingerprints of the bodies that were read and are supported, with the first release that
# has each. Megatron-Core 0.16.0 to 0.19.2.
KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("DistributedOptimizer", "_build_model_and_main_param_groups"): {
        "2845e6b20d9490e4": "0.16.0",
        "493904512ef1a3bf": "0.17.1",
        "c61139acc5e186ca": "0.18.0",
        "6f202b3251f4d6fe": "0.19.0",
    },
    ("DistributedOptimizer", "_build_model_param_to_state_dict_param_map"): {
        "a8e5f9e80b0ab8db": "0.16.0",
        "7c362eefaa72467a": "0.17.1",
        "849c38bf2c9e9cdf": "0.18.0",
        "38e5dcf1624fa165": "0.19.0",
    },
    ("DistributedOptimizer", "_copy_main_params_to_model_params"): {
        "282e6030b3ef40d0": "0.16.0",
        "74c4bb60c5d0dfba": "0.17.1",
        "ed5522a255264f86": "0.18.0",
    },
    ("DistributedOptimizer", "_copy_model_grads_to_main_grads"): {"ed07c5f84f331f83": "0.16.0"},
    ("DistributedOptimizer", "_copy_model_params_to_main_params"): {
        "20d656d92d288593": "0.16.0",
        "f7200e8c86c8c0a3": "0.18.0",
    },
    ("DistributedOptimizer", "_get_model_param_range_map"): {"a5a6d99575065998": "0.16.0"},
    ("DistributedOptimizer", "get_grad_stats_parallel_group"): {"57900db513957953": "0.16.0"},
    ("DistributedOptimizer", "load_state_dict"): {
        "cb1b0f07d84262d9": "0.16.0",
        "571842f535bba334": "0.19.0",
    },
    ("DistributedOptimizer", "sharded_state_dict"): {"6413c9918e21514f": "0.16.0"},
    ("DistributedOptimizer", "state_dict"): {"a5f7587170434d01": "0.16.0"},
    ("DistributedOptimizer", "step_with_ready_grads"): {
        "a44c80bb2db58a74": "0.16.0",
        "dd03993b3968d754": "0.18.0",
    },
    ("MixedPrecisionOptimizer", "reload_model_params"): {"d0cd10fe87acfc57": "0.16.0"},
    ("MixedPrecisionOptimizer", "step"): {"1bec0cdb31291e22": "0.16.0", "23504ee37ee7d295": "0.19.0"},
    ("MixedPrecisionOptimizer", "step_with_ready_grads"): {
        "2939ab43b58a7913": "0.16.0",
        "ecbe8414ce738d32": "0.19.0",
    },
}


def fingerprint(method: Callable) -> str:
    """16 hex digits of the method's code. Raises OSError where there is no source."""
    method = getattr(method, "__func__", method)  # a classmethod's function
    tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    if ast.get_docstring(tree, clean=False) is not None:
        tree.body = tree.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def unknown_methods(classes: dict[str, type]) -> list[str]:
    """The methods, as `Class.method`, whose code is not one of the known ones. `classes` by name."""
    unknown = []
    for (class_name, method_name), known in KNOWN.items():
        method = vars(classes[class_name]).get(method_name)
        if method is None or fingerprint(method) not in known:
            unknown.append(f"{class_name}.{method_name}")
    return unknown
