"""What measuring reasoning steps costs: prefill, continuations per second, and a multiple of the rollout.

    python tools/benchmarks/vsrm.py [--prompts 4 --samples 4 --response 1024]

A model of random weights answers to full length on a vLLM server here; every response is cut into steps
of some hundred tokens and its prefixes are continued as a run continues them. Prints Markdown tables:
prefill by the server's own counters; throughput beside vLLM's own engine, which is given the same prompts
at once in a process of its own, both with an empty cache; cost with `share` and `max_prefixes` swept.
Compare rows of one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_meds.rollout.client import Client
from megatron_meds.rollout.messages import Request, Sampling
from megatron_meds.rollout.server import Servers
from megatron_meds.rollout.settings import RolloutSettings, ServerSettings
from megatron_meds.vsrm import StepPlan, StepRules, plan_prefixes

VOCABULARY, CANDIDATES, PROMPT = 256, 5, 64
BLOCK, KV_GIB, SEQUENCES = 32, 1.0, 128
RULES = StepRules(skip=100, gap=100, unit="tokens", markers=("But",))
CLOSE = [1, 2]


@dataclass(frozen=True)
class Cost:
    """Of continuing some prefixes."""

    prefixes: int
    asked: float
    """Prompt tokens, once for each continuation."""
    computed: float
    """Of these, those that the prefix cache did not hold."""
    tokens: int
    """Sampled."""
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--continuation", type=int, default=64, help="tokens")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        return engine(options.engine)
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), options)
    return None


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Roll out, continue, and print."""
    make_model(folder / "model")
    longest = PROMPT + options.response + len(CLOSE) + options.continuation
    settings = RolloutSettings(max_tokens=options.response)
    server = ServerSettings(kv_cache_gib=KV_GIB, max_num_seqs=SEQUENCES, block_size=BLOCK)
    with Servers.start(
        server, folder / "model", run_dir=folder, max_model_len=longest, dtype="float32",
        device="cpu", transport="shm", seed=0,
    ) as servers:  # fmt: skip
        client = Client(servers.urls, settings, vocabulary=VOCABULARY)
        prompts = [[(7 * i + 3 * k) % 250 + 4 for k in range(PROMPT)] for i in range(options.prompts)]
        started = time.perf_counter()
        groups = client.sample([Request(p, options.samples, seed=100 * i) for i, p in enumerate(prompts)])
        rollout = time.perf_counter() - started
        pairs = [(p, s.token_ids) for p, group in zip(prompts, groups, strict=True) for s in group]
        tokens = sum(len(ids) for _, ids in pairs)
        print(f"{len(pairs)} responses, {tokens / len(pairs):.0f} tokens on average, {rollout:.1f} s\n")
        sweep(client, pairs, options.continuation, rollout, tokens)
        httpx.post(f"{servers.urls[0]}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
        plans = [plan(p, ids, None) for p, ids in pairs]
        served = ask(client, plans, options.continuation)
    beside_engine(folder, plans, longest, options.continuation, served)


def sweep(
    client: Client, pairs: list[tuple[list[int], list[int]]], continuation: int, rollout: float, tokens: int
) -> None:
    """Cost of each bound. The cache holds what the rollout, and then the rows above, have left there."""
    print("| share | most | prefixes | prefill computed / asked | tokens / rollout's | time / rollout's |")
    print("|---:|---:|---:|---:|---:|---:|")
    for share, most in ((1.0, None), (1.0, 8), (1.0, 4), (0.5, None), (0.25, 4)):
        chosen = pairs[: max(1, round(share * len(pairs)))]
        cost = ask(client, [plan(p, ids, most) for p, ids in chosen], continuation)
        print(
            f"| {share:g} | {most or 'all'} | {cost.prefixes} | {cost.computed / cost.asked:.3f} "
            f"| {cost.tokens / tokens:.2f} | {cost.seconds / rollout:.2f} |",
            flush=True,
        )


def plan(prompt: list[int], ids: list[int], most: int | None) -> StepPlan:
    """Steps of a response of random ids: as text, an id in sixteen begins a sentence with a marker."""
    return plan_prefixes(prompt, ids, decode(ids), decode, CLOSE, RULES, opened=True, most=most)


def decode(ids: list[int]) -> str:
    """A text in which ids can be told apart as tokens."""
    return "".join("\nBut " if i % 16 == 0 else "x " for i in ids)


def ask(client: Client, plans: list[StepPlan], continuation: int) -> Cost:
    """Continue all prefixes as a run does: once each, a response's together, shortest first."""
    requests = [
        Request(list(ids), CANDIDATES, seed=j, sampling=sampling(continuation), group=j)
        for j, ids in enumerate(unlike(plans))
    ]
    before, started = client.prefix_cache(), time.perf_counter()
    answers = client.sample(requests)
    seconds, after = time.perf_counter() - started, client.prefix_cache()
    asked, found = after[0] - before[0], after[1] - before[1]
    drawn = sum(len(s.token_ids) for answer in answers for s in answer)
    return Cost(len(requests), asked, asked - found, drawn, seconds)


def unlike(plans: list[StepPlan]) -> list[tuple[int, ...]]:
    """The different prefixes of all plans."""
    return list(dict.fromkeys(ids for one in plans for ids in one.prefixes))


def sampling(continuation: int) -> Sampling:
    return Sampling(temperature=0.6, top_p=0.95, max_tokens=continuation, logprobs=False)


def beside_engine(folder: Path, plans: list[StepPlan], longest: int, continuation: int, served: Cost) -> None:
    """Print the throughput of the server and of vLLM's own engine on the same prompts."""
    job = folder / "job.json"
    work = {"model": str(folder / "model"), "longest": longest, "continuation": continuation}
    job.write_text(json.dumps(work | {"prompts": unlike(plans)}))
    command = [sys.executable, __file__, "--engine", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    alone = json.loads(done.stdout.splitlines()[-1])
    ours, own = served.tokens / served.seconds, alone["tokens"] / alone["seconds"]
    print("\n| same prompts, empty cache | computed / asked | seconds | tokens/s | of the engine's |")
    print("|---|---:|---:|---:|---:|")
    print(f"| vLLM's engine, all at once | | {alone['seconds']:.1f} | {own:.0f} | 1 |")
    print(
        f"| as a run asks | {served.computed / served.asked:.3f} | {served.seconds:.1f} | {ours:.0f} "
        f"| {ours / own:.2f} |"
    )


def engine(job: Path) -> None:
    """vLLM's own maximum: its offline engine on all prompts at once; prints tokens and seconds."""
    from vllm import LLM, SamplingParams

    work = json.loads(job.read_text())
    llm = LLM(
        work["model"], skip_tokenizer_init=True, dtype="float32", max_model_len=work["longest"],
        max_num_seqs=SEQUENCES, kv_cache_memory_bytes=int(KV_GIB * 2**30), block_size=BLOCK,
        enforce_eager=True, enable_prefix_caching=True, enable_chunked_prefill=False,
        max_num_batched_tokens=max(8192, work["longest"]), generation_config="vllm",
    )  # fmt: skip
    params = SamplingParams(
        n=CANDIDATES, temperature=0.6, top_p=0.95, max_tokens=work["continuation"], detokenize=False, seed=0
    )
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p in work["prompts"]], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    print(
        json.dumps({"tokens": sum(len(c.token_ids) for o in outputs for c in o.outputs), "seconds": seconds})
    )


def make_model(folder: Path) -> None:
    """Random weights of the tiny reasoner's size, with room for long responses and no end of text."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=160, intermediate_size=448, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
