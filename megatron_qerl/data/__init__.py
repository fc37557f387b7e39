"""Problems, prompts and the order in which they are taken."""

from megatron_qerl.data.dataset import EVALUATION_SHUFFLE_SEED, load_dataset, require_disjoint

__all__ = ["EVALUATION_SHUFFLE_SEED", "load_dataset", "require_disjoint"]
