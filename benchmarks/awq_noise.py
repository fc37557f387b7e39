"""Does noise of one sigma act alike on the BF16, max-quantised and AWQ-quantised copies of a model?

python -m benchmarks.awq_noise --hf models/smollm2-hf --max models/smollm2-max --awq models/smollm2-nvfp4

AWQ divides channels of the norm scales by factors s, and next to w / s the same noise is relatively s times as strong.
``NoiseRegistry(folded=...)`` adds z / s there, so that sigma should mean the same on every copy; the AWQ copy is
measured with that correction and without it.

Writes results/awq_noise.json. ``mean_abs_nats`` is the mean |noisy - clean| log-probability over the tokens of the
answers to the demo's held-out problems, noisy and clean policy being of the same folder; mean and standard deviation
over the seeds. A seed draws the same z for every copy. Computed in float32, which rounds far below the smallest effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import RESULTS, write
from megatron_qerl.config.loader import load_config
from megatron_qerl.errors import UserError
from megatron_qerl.evaluation import evaluation_prompts
from megatron_qerl.layers.packing import PackedTokens, pack
from megatron_qerl.models.policy import LogprobQuery
from megatron_qerl.models.walk import expected_norms, norms
from megatron_qerl.noise.registry import NoiseRegistry
from megatron_qerl.parallel import setup
from megatron_qerl.session import Session, open_session
from megatron_qerl.types import NoiseState

DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
DTYPE = "float32"
SIGMAS = (1e-3, 1e-2)
#: Copy -> how its folder's manifest names the calibration; the original has no manifest.
METHODS = {"hf": None, "max": "max", "awq": "awq"}


def open_copy(name: str, path: Path, source: str | None) -> Session:
    """A copy under the demo's settings.

    Args:
        source: base hash of the original, from which a quantised copy must come.

    Raises:
        UserError: the folder is not the copy that its option asks for, or comes from another model.
    """
    session = open_session(
        load_config(DEMO, options={"model.path": str(path), "model.dtype": DTYPE, "model.device": "auto"})
    )
    manifest = session.folder.manifest
    method = None if manifest is None else manifest["quantization"]["method"]
    if method != METHODS[name] or session.folder.quantized != (name != "hf"):
        raise UserError(
            f"--{name}", path, f"must be a copy of method {METHODS[name]}, is {method}", "name another folder"
        )
    if manifest is not None and manifest["source"]["tensors_sha256"] != source:
        raise UserError(f"--{name}", path, "was not quantised from the model of --hf", "quantise that one")
    if (name == "awq") != bool(session.registry.folded):
        raise UserError(f"--{name}", path, "records no folded norm that gets noise", "quantise with --calibration awq")
    return session


def answers(session: Session, problems: int) -> PackedTokens:
    """The first held-out problems, each with its answer and the end of the response."""
    groups = []
    for prompt in evaluation_prompts(session, problems):
        answer = session.tokenizer.encode(prompt.problem.answer, add_special_tokens=False)
        groups.append((prompt.token_ids, [(*answer, session.tokenizer.eos_token_id)]))
    return pack(groups, session.parallel.device, share_prefix=True)


def logprobs(session: Session, registry: NoiseRegistry, tokens: PackedTokens, noise: NoiseState | None) -> Tensor:
    """FP32 [T] log-probabilities of the answers' tokens under ``noise``."""
    query = LogprobQuery(tokens.logit_rows, tokens.targets, 1.0, session.config.train.logprob_chunk_tokens)
    with torch.no_grad(), registry.applied(noise):
        values_T, _ = session.model(tokens.token_ids, tokens.position_ids, packed_seq_params=tokens.params, query=query)
    return values_T


def rows(name: str, session: Session, tokens: PackedTokens, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row a sigma and correction."""
    shape, config = session.shape, session.config
    uncorrected = NoiseRegistry(norms(session.model, shape), expected_norms(shape), config.noise, config.run.seed)
    clean_T = logprobs(session, uncorrected, tokens, None)
    for registry in (uncorrected, session.registry) if session.registry.folded else (uncorrected,):
        for sigma in SIGMAS:
            changes = []
            for seed in seeds:
                noise = replace(registry.state(0, 1), stage=1, sigma=sigma, seed=seed)
                changes.append(float((logprobs(session, registry, tokens, noise) - clean_T).abs().mean()))
            yield {
                "copy": name,
                "corrected": registry is session.registry,
                "sigma": sigma,
                "mean_abs_nats": fmean(changes),
                "std_over_seeds_nats": stdev(changes),
                "by_seed_nats": changes,
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every copy and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, type=Path, help="the original, a Hugging Face folder")
    parser.add_argument("--max", required=True, type=Path, help="made from it by quantize --calibration max")
    parser.add_argument("--awq", required=True, type=Path, help="made from it by quantize --calibration awq")
    parser.add_argument("--output", type=Path, default=RESULTS / "awq_noise.json")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems, two or three tokens each")
    parser.add_argument("--seeds", type=int, default=8, help="draws of the noise, at least two")
    args = parser.parse_args(arguments)
    if args.seeds < 2 or args.problems < 1:
        parser.error("a spread needs --seeds 2 or more, and a mean --problems 1 or more")
    seeds = range(1, args.seeds + 1)
    copies: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    asked: list[PackedTokens] = []
    source: str | None = None
    for name in METHODS:
        session = open_copy(name, getattr(args, name), source)
        source = source or session.base_hash
        asked.append(answers(session, args.problems))
        assert torch.equal(asked[-1].token_ids, asked[0].token_ids), "the copies have one tokenizer"
        copies[name] = {"path": str(session.folder.path), "base_hash": session.base_hash}
        for row in rows(name, session, asked[-1], seeds):
            print({k: v for k, v in row.items() if k != "by_seed_nats"}, file=sys.stderr, flush=True)
            results.append(row)
    write(
        args.output,
        {
            "copies": copies,
            "dtype": DTYPE,
            "problems": args.problems,
            "tokens": asked[0].targets.numel(),
            "seeds": list(seeds),
            "rows": results,
        },
    )
    setup.shutdown()


if __name__ == "__main__":
    main()
