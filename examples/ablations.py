"""What each part of T* is worth on the built-in task: the quickstart's runs again, one thing changed in each.

    tstar quickstart --seed 0 --out runs/seed0                              # bases, and the main comparison
    python examples/ablations.py runs/seed0 runs/seed1 --out runs/ablations # every arm from each seed's bases
    python examples/ablations.py runs/seed0 --out runs/again --arms tstar direct --seeds 1 2
    python examples/ablations.py runs/seed0 --out runs/sft --arms sft       # SFT: block sizes, weightings

Each arm is a `tstar train` from a base of that seed, then a `tstar eval` of its best checkpoint at B = 16
under its own policy and three others. Interrupted, the same call goes on; it ends with a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tstar import quickstart
from tstar.quickstart import BLOCK_SIZES, POLICIES, Task

TARGET = BLOCK_SIZES[-1]


@dataclass(frozen=True)
class Arm:
    """One way to come to a policy at the target block size."""

    recipe: str
    base: str
    """Which of the quickstart's models it starts from."""
    overrides: tuple[str, ...] = ()


def stages(updates: tuple[int, int, int]) -> tuple[str, ...]:
    """So many updates at each block size."""
    return tuple(
        f"curriculum.stages.{block_size}.num_updates={count}"
        for block_size, count in zip(BLOCK_SIZES, updates, strict=True)
    )


def arms(updates: tuple[int, int, int]) -> dict[str, Arm]:
    """Every arm; T* has so many updates at B = 4, 8, 16, the direct ones as many in all."""
    total_updates = sum(updates)
    total = (f"curriculum.updates_per_stage={total_updates}",)
    # A twelfth of the updates at B = 4, as many at B = 8, the rest at the target.
    twelfth = max(1, total_updates // 12)
    early = stages((twelfth, twelfth, total_updates - 2 * twelfth))
    rising = tuple(
        f"curriculum.stages.{block_size}.policies=[{{kind: static, tokens_per_step: {block_size // 4}}}]"
        for block_size in BLOCK_SIZES
    )
    high = ("trainer.optimizer.learning_rate=4.0e-4",)
    one_at_a_time = "curriculum.cold_start.policy={kind: static}"  # what a cold start learns is decoded so
    cold = "{num_problems: 3000, num_samples: 1, num_steps: 150, batch_size: 64, learning_rate: 1.0e-3, "
    cold += "policy: {kind: static}}"
    mixture = (
        "rollout.policies=[{kind: static, tokens_per_step: 4}, {kind: static, tokens_per_step: 2}, "
        "{kind: dynamic, confidence_threshold: 0.9}]"
    )

    def tstar(*overrides: str) -> Arm:
        return Arm("quickstart-tstar", "b4", stages(updates) + overrides)

    def direct(*overrides: str, base: str = "b16") -> Arm:
        return Arm("quickstart-direct-b16", base, total + overrides)

    return {
        "tstar": tstar(),
        "direct": direct(),
        "tstar-shift-off": tstar("curriculum.shifted_rollouts=off"),
        "tstar-shift-sample": tstar("curriculum.shifted_rollouts=sample"),
        "tstar-no-cold-start": tstar("curriculum.cold_start=null"),
        "tstar-mixture": tstar(mixture),
        "tstar-step-norm-length": tstar("trainer.objective.step_norm=length"),
        "tstar-value": tstar("trainer.value={optimizer: {learning_rate: 2.0e-4, warmup_steps: 4}}"),
        "tstar-plateau": tstar("curriculum.plateau={patience: 2}", "validation.every=5"),
        "tstar-cold-k1": tstar(one_at_a_time),
        "tstar-early": tstar(*early),
        "tstar-early-cold-k1": tstar(*early, one_at_a_time),
        "tstar-early-rising-k": tstar(*early, *rising),
        "tstar-high-lr": tstar(*high),
        "direct-high-lr": direct(*high),
        "direct-cold-start": direct(f"curriculum.stages.{TARGET}.cold_start={cold}"),
        "direct-mixture": direct(mixture),
        "direct-cold-start-mixture": direct(f"curriculum.stages.{TARGET}.cold_start={cold}", mixture),
        "direct-from-b8": direct(base="b8"),
    }


def train_tasks(name: str, arm: Arm, base: Path, seed: int, out: Path) -> Iterator[Task]:
    """Training, then evaluation."""
    run, name = out / f"seed{seed}" / name, f"seed{seed}-{name}"
    # Only what an arm is judged by is validated while it trains; the evaluation takes the others.
    fixed = (f"model={base / arm.base / 'model'}", f"seed={seed}", "validation.extra_policies=[]")
    options = ("train", arm.recipe, f"--out={run}", *fixed, *arm.overrides)
    yield Task(name, name, options, run, (), 200.0, 1, "update_step")
    yield eval_task(name, f"{run.name}={run / 'best'}", TARGET, seed, out)


def eval_task(name: str, model: str, block_size: int, seed: int, out: Path) -> Task:
    options = (
        "eval",
        model,
        "--data=chain:9@test",
        f"--out={out / 'eval' / name}",
        f"--block-size={block_size}",
        "--samples=1",
        "--limit=400",
        f"--seed={seed}",
        "--policy",
        *POLICIES,
    )
    run, num = out / "eval" / name, len(POLICIES)
    return Task(
        f"eval-{name}", f"eval {name}", options, run, (name,), 12.0, num, "evaluations", is_resumable=False
    )


def sft_tasks(base: Path, seed: int, out: Path) -> Iterator[Task]:
    """From the AR model to each block size with equal steps; both weightings of Eq. 2."""
    for block_size in (4, 8, 16, 32):
        for weighting in ("constant", "inverse_t"):
            name = f"seed{seed}-b{block_size}-{weighting}"
            options = (
                "sft",
                f"--out={out / name}",
                "--data=chain:9",
                f"--model={base / 'ar' / 'model'}",
                "--num-examples=8000",
                "--num-steps=300",
                "--learning-rate=1e-3",
                f"--block-sizes={block_size}",
                f"--weighting={weighting}",
                f"--seed={seed}",
            )
            yield Task(name, name, options, out / name, (), 60.0, 300, "optimizer_step")
            yield eval_task(name, f"{weighting}={out / name / 'model'}", block_size, seed, out)


def seed_of(base: Path) -> int:
    return int(base.name.removeprefix("seed"))


def table(out: Path) -> str:
    """Accuracy (%) and tokens per forward of everything that has been evaluated."""
    rows = []
    for path in sorted(out.glob("eval/*/results.json")):
        found = {e["policy"]: e for e in json.loads(path.read_text(encoding="utf-8"))["evaluations"]}
        cells = [
            f"{100 * e['accuracy']['value']:5.1f} ({e['tokens_per_forward']['value']:.2f})"
            for e in found.values()
        ]
        if not rows:
            rows.append(f"{'':34} " + " ".join(f"{policy:>14}" for policy in found))
        rows.append(f"{path.parent.name:34} " + " ".join(f"{cell:>14}" for cell in cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "bases", type=Path, nargs="+", help="directories of tstar quickstart, named seed0, seed1, ..."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="default: the bases' own")
    parser.add_argument(
        "--arms", nargs="*", default=[], help="default: all but sft; ARM@seed1 is for one seed alone"
    )
    parser.add_argument(
        "--updates", type=int, nargs=3, default=(30, 30, 60), metavar="N", help="at B = 4, 8, 16"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes side by side, one thread each")
    options = parser.parse_args()
    known, out = arms(tuple(options.updates)), options.out.resolve()
    tasks: list[Task] = []
    for wanted in options.arms or known:
        name, _, only = wanted.partition("@")
        for base in (b.resolve() for b in options.bases):
            for seed in options.seeds or [seed_of(base)]:
                if only in ("", f"seed{seed}"):
                    arm = known.get(name)
                    tasks += train_tasks(name, arm, base, seed, out) if arm else sft_tasks(base, seed, out)
    quickstart.prepare(tasks, out)
    done: set[str] = set()

    def say(state: quickstart.State) -> None:
        for name in state.took.keys() - done:
            print(f"{name}: done in {state.took[name]:.0f} s", flush=True)
            done.add(name)

    quickstart.run(tuple(tasks), out, options.workers, say)
    print(table(out))


if __name__ == "__main__":
    main()
