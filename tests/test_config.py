"""Configuration: recipes, YAML, overrides, and every way of saying no in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tiny_runs import tiny_config
from tstar import cli
from tstar.cli.settings import COMPLETE, Documented
from tstar.cli.train import Train
from tstar.config import RunConfig, load_config, read_config, to_yaml
from tstar.config.reading import list_recipes, merged
from tstar.config.reference import docstrings, list_settings, to_markdown
from tstar.config.text import parse_yaml
from tstar.curriculum import ColdStart, WeightedPolicy
from tstar.errors import UserError
from tstar.trainer import ValueConfig
from tstar.unmask import UnmaskPolicy

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: models/none\n"
        "data: {source: chain:3}\n"
        "curriculum: {target_block_size: 16, stages: {8: {num_updates: 3}}}\n"
        "rollout: {policies: [{kind: static}, {kind: dynamic, confidence_threshold: 0.9}]}\n"
    )
    return str(path)


# -- recipes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_recipes())
def test_a_shipped_recipe_resolves_and_dry_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no quickstart has left the recipe's model
    config = load_config(name)
    assert read_config(parse_yaml(to_yaml(config), name)) == config
    assert cli.main(["train", name, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    settings, _, outlook = shown.partition("\n\n")
    assert read_config(parse_yaml(settings, name)) == config
    for stage in config.stages:
        assert re.search(rf"\n\s*{stage.block_size}\s+{stage.num_updates}\s", outlook), outlook
    assert f"{config.model} is not there" in " ".join(outlook.split())
    is_estimated = "estimated for one h200" in " ".join(outlook.split())
    assert is_estimated == ("?" not in outlook) == name.startswith("sdar")
    assert max(map(len, outlook.splitlines())) <= 80
    assert "…" not in outlook


def test_the_recipes_that_are_promised() -> None:
    sdar = [f"sdar-1.7b-{kind}" for kind in ("tstar", "tracerl-b4", "direct-b8", "direct-b16", "direct-b32")]
    kinds = ("tstar", "tstar-value", "tstar-length", "direct-b8", "direct-b16")
    quickstart = [f"quickstart-{kind}" for kind in kinds]
    larger = [name.replace("1.7b", "4b") for name in sdar]
    options = [f"sdar-1.7b-tstar-{kind}" for kind in ("value", "parallelism", "importance")]
    others = {"sdar-8b-tstar", "sdar-30b-a3b-tstar", *options}
    assert {*sdar, *quickstart, *larger, *others} <= set(list_recipes())
    value, length = (load_config(f"quickstart-tstar-{kind}").trainer for kind in ("value", "length"))
    assert (value.value is None, length.objective.step_norm) == (False, "length")


def test_a_models_name_is_its_tstar() -> None:
    for model in ("sdar-1.7b", "sdar-4b", "sdar-8b", "sdar-30b-a3b", "quickstart"):
        assert load_config(model) == load_config(f"{model}-tstar")


def test_the_papers_numbers() -> None:
    tstar, direct = load_config("sdar-1.7b-tstar"), load_config("sdar-1.7b-direct-b16")
    assert [stage.block_size for stage in tstar.stages] == [4, 8, 16, 32]
    assert {stage.num_passes for stage in tstar.stages} == {2}
    (stage,) = direct.stages
    assert (stage.block_size, stage.num_updates, stage.num_passes) == (16, 30, 1)
    for config in (tstar, direct):
        assert (config.rollout.num_problems, config.rollout.num_samples) == (128, 16)
        assert config.rollout.policies == (WeightedPolicy("static"),)
        assert config.trainer.optimizer.learning_rate == 1e-6
        assert config.trainer.objective.kl_beta == 0.01
        assert config.trainer.objective.kl_reference == "base"
        assert config.data.levels == (3, 5)


def test_a_recipe_extends_another(tmp_path: Path, recipe: str) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: recipe.yaml\ncurriculum: {updates_per_stage: 7}\nrollout: {num_samples: 2}\n")
    config = load_config(str(child))
    assert [stage.num_updates for stage in config.stages] == [7, 3, 7]
    assert (config.rollout.num_samples, len(config.rollout.policies)) == (2, 2)
    child.write_text("extends: child.yaml\n")
    with pytest.raises(UserError, match="extends itself"):
        load_config(str(child))
    child.write_text("extends: quickstar\n")
    with pytest.raises(UserError, match=r"recipe: 'quickstar' is unknown; did you mean quickstart-\S+\?$"):
        load_config(str(child))


def test_sections_merge_and_everything_else_is_replaced() -> None:
    assert merged({"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "d": {"e": 2}}) == {
        "a": {"b": 1, "c": [3]},
        "d": {"e": 2},
    }


def test_recipes_are_in_the_wheel() -> None:
    import tomllib

    packages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert packages["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/tstar"]
    assert (REPOSITORY / "src/tstar/recipes/quickstart-tstar.yaml").is_file()


# -- stages ------------------------------------------------------------------------------------


def test_stages_take_what_is_theirs(recipe: str) -> None:
    overrides = [
        "curriculum.cold_start={num_steps: 50}",
        "curriculum.plateau={}",
        "curriculum.stages.8.learning_rate=2e-5",
        "curriculum.stages.8.cold_start=off",
        "curriculum.stages.16={shifted_rollouts: off, plateau: off}",
        "curriculum.stages.16.policies=[{kind: static, tokens_per_step: 4}]",
        "curriculum.stages.4.keep_optimizer=false",
    ]
    first, second, third = load_config(recipe, overrides).stages
    assert (first.cold_start, second.cold_start, third.cold_start) == (None, None, ColdStart(num_steps=50))
    assert (first.learning_rate, second.learning_rate) == (1e-6, 2e-5)
    assert (first.keep_optimizer, second.keep_optimizer) == (False, True)
    assert (second.num_updates, third.num_updates) == (3, 30)
    assert (second.num_passes, third.num_passes) == (2, 1)
    assert second.plateau is not None
    assert third.plateau is None
    assert third.policies == (WeightedPolicy("static", 4),)
    assert second.policies[1] == WeightedPolicy("dynamic", confidence_threshold=0.9)


def test_the_validation_policy_is_that_of_the_rollouts(recipe: str) -> None:
    config = load_config(recipe)
    found = config.validation_policy(config.stages[0])
    assert type(found) is UnmaskPolicy
    assert found == UnmaskPolicy()
    config = load_config(recipe, ["validation.policy={kind: random}"])
    assert config.validation_policy(config.stages[0]) == UnmaskPolicy("random")
    assert config.validation_source == "chain:3@validation"


# -- YAML --------------------------------------------------------------------------------------


def test_yaml_means_what_it_looks_like() -> None:
    text = "a: off\nb: 1e-6\nc: 1:30\nd: 010\ne: [true, null, ~, .5, -3, 1_000, '1']\nf:\n"
    assert parse_yaml(text, "x") == {
        "a": "off",
        "b": 1e-6,
        "c": "1:30",
        "d": 10,
        "e": [True, None, None, 0.5, -3, "1_000", "1"],
        "f": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "x: no valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "x: line 3: 'a' stands there twice"),
        ("? [1, 2]\n: 3\n", "is no name"),
        ("a: !!python/object:os.system x\n", "x: line 1: no valid YAML"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(UserError, match="cannot be read"):
        load_config(str(path))
    path.write_text("- 1\n")
    with pytest.raises(UserError, match="holds list, no settings"):
        load_config(str(path))
    path.write_text("")
    with pytest.raises(UserError, match="model: none is given"):
        load_config(str(path))


# -- overrides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.num_sample=3",
            "rollout.num_sample: there is no such setting; did you mean rollout.num_samples?",
        ),
        ("rolout.num_samples=3", "rolout: there is no such setting; did you mean rollout?"),
        ("zzz=3", "zzz: there is no such setting; use one of checkpoints, curriculum, data"),
        (
            "rollout.num_samples=three",
            "rollout.num_samples: 'three' cannot be used; use a whole number",
        ),
        ("rollout.num_samples=0", "rollout.num_samples: 0 is too small; use 1 or more"),
        ("rollout.num_samples=2.5", "rollout.num_samples: 2.5 cannot be used; use a whole number"),
        ("rollout.num_samples=true", "rollout.num_samples: true cannot be used; use a whole number"),
        (
            "rollout.num_samples=1000000000000",
            "rollout.num_samples: 1000000000000 for each of 128 problems are",
        ),
        ("rollout..num_samples=3", "rollout..num_samples=3: is no override"),
        ("rollout.temperature=.inf", "rollout.temperature: inf cannot be used; use a finite number"),
        (
            "trainer.objective.kl_beta=.nan",
            "trainer.objective.kl_beta: nan cannot be used; use a finite number",
        ),
        ("trainer.truncated_is_wrong=3", "trainer.truncated_is_wrong: 3 cannot be used; use true or false"),
        ("rollout.num_samples", "rollout.num_samples: is no override; write NAME=VALUE"),
        ("seed=[", "seed: no valid YAML"),
        ("seed.x=3", "seed: is one value and has no x; give seed=VALUE"),
        ("seed=-1", "seed: -1 is too small"),
        ("seed=null", "seed: null cannot be used; use a whole number"),
        ("seed=99999999999999999999", "seed: 99999999999999999999 is too large"),
        ("seed=" + 500 * "[", "seed: is nested too deeply"),
        ("rollout=3", "rollout: 3 is no section; give its fields, like rollout.num_problems"),
        ("lora=3", "lora: 3 is no section; give its fields, or null"),
        ("precision=float16", "precision: 'float16' cannot be used; use 'float32' or 'bfloat16'"),
        ("guard.action=halt", "guard.action: 'halt' cannot be used; use 'warn', 'stop' or 'roll_back'"),
        ("data.levels=3", "data.levels: 3 cannot be used; use a list, as [...]"),
        ("data.levels=[3]", "data.levels.1: [3] cannot be used; the list is too short"),
        ("data.levels=[3, 4, 5]", "data.levels: [3, 4, 5] cannot be used; the list is too long"),
        ("model=null", "model: null cannot be used; use a path"),
        ("data.levels=[5, 3]", "data.levels: [5, 3] is empty; give the lower one first"),
        ("data.prompt=solve", "data.prompt: 'solve' is unknown"),
        ("rollout.policies=[]", "rollout.policies: none given"),
        ("rollout.policies={kind: static}", "rollout.policies: {'kind': 'static'} is no list; write [{...}]"),
        ("rollout.policies.5.kind=static", "rollout.policies.5: there are 2 entries, counted from 0"),
        ("rollout.policies.x.kind=static", "rollout.policies.x: 'x' is no number of an entry, from 0"),
        ("rollout.policies.0.tokens_per_step=0", "rollout.policies.0.tokens_per_step: 0 is no budget"),
        (
            "rollout.policies.1.kind=static",
            "rollout.policies.1.confidence_threshold: 0.9 changes nothing under",
        ),
        ("rollout.policies.0.weight=-1", "rollout.policies: weights [-1.0, 1.0] cannot be drawn by"),
        ("rollout.temperature=0", "rollout.temperature: 0.0 leaves nothing to explore"),
        ("validation.policy.kind=dynamic", "validation.policy.confidence_threshold: missing"),
        ("validation.every=0", "validation.every: 0 is too small"),
        ("rewards.terms=[{}]", "rewards.terms.0.name: is missing; give it"),
        ("rewards.terms=[{name: maths}]", "rewards.terms.0: rewards: 'maths' is unknown"),
        ("trainer.objective.clip_eps=3", "trainer.objective.clip_eps: 3.0 is not between 0 and 1"),
        ("trainer.accuracy_band=[0.8, 0.2]", "trainer.accuracy_band: [0.8, 0.2] is no part of [0, 1]"),
        ("trainer.value.gamma=2", "trainer.value.gamma: 2.0 cannot be used; use 0 to 1"),
        ("trainer.optimizer.lr_schedule=cosine", "trainer.optimizer.num_steps: None cannot be used"),
        ("engine.memory=2.0", "engine.memory: 2.0 cannot be used"),
        ("tracking.trackers=[mlflow]", "tracking.trackers.0: ['mlflow'] cannot be used; use 'wandb'"),
        ("tracking.trackers=[wandb, wandb]", "tracking.trackers: wandb, wandb name one twice"),
        ("guard.patience=0", "guard.patience: 0 is out of range; use 1 or more"),
        (
            "curriculum.initial_block_size=32",
            "curriculum.target_block_size: 16 is not initial_block_size = 32 doubled; use 32",
        ),
        ("curriculum.target_block_size=24", "curriculum.target_block_size: 24 is not initial_block_size = 4"),
        (
            "curriculum.target_block_size=512",
            "curriculum.target_block_size: 512 is too large; use 256 or less",
        ),
        ("curriculum.cold_start.num_steps=0", "curriculum.cold_start.num_steps: 0 is too few"),
        (
            "curriculum.cold_start.num_steps=3",
            "curriculum.cold_start.warmup_steps: 5 does not fit num_steps: 3",
        ),
        (
            "curriculum.stages.9.num_updates=1",
            "curriculum.stages: 9 is no stage; the block sizes are 4, 8, 16",
        ),
        ("curriculum.stages.x.num_updates=1", "curriculum.stages.x: 'x' is no block size"),
        ("curriculum.stages.8.num_updates=0", "curriculum.stages.8.num_updates: 0 is too small"),
        ("curriculum.stages.8.updates=1", "curriculum.stages.8.updates: there is no such setting"),
        (
            "curriculum={initial_block_size: 5, target_block_size: 5}",
            "curriculum.initial_block_size: 5 is odd and has no half shift",
        ),
        ("trainer.objective.importance_cap=2", "trainer.objective.importance_cap: it weighs by the engine's"),
        ("rollout.num_problems=1", "rollout.num_problems: 1 problem cannot be split into two halves"),
        ("rollout.num_samples=1", "rollout.num_samples: 1 response has no group"),
        ("data.source=gsm8k@train", "validation.source: none is given, and gsm8k@train has no split"),
        ("data.source=''", "data.source: none is given"),
    ],
)
def test_a_wrong_override_is_one_clear_line(
    recipe: str, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, equals, value = override.partition("=")
    flag = [f"--{name.replace('_', '-')}", value] if equals else [override]
    for arguments in ([override], flag):
        assert cli.main(["train", recipe, *arguments, "--dry-run"]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith(f"tstar: error: {message}") or message in shown.err
        assert shown.err.count("\n") == 1
        assert shown.out == ""


def test_overrides_of_every_kind(recipe: str) -> None:
    config = load_config(
        recipe,
        [
            "rollout.num-samples=8",
            "rollout.policies.1.weight=0.5",
            "trainer.accuracy_band=[0.2, 0.8]",
            "trainer.value={}",
            "lora.rank=4",
            "engine.memory=0.25",
            "rewards.terms=[{name: chain}, {name: parallelism, options: {target: 4}}]",
            "rewards.terms.1.options.target=6",
            "data.prompt=Answer {question}",
            "seed=3",
        ],
    )
    assert (config.rollout.num_samples, config.rollout.policies[1].weight) == (8, 0.5)
    assert config.trainer.accuracy_band == (0.2, 0.8)
    assert config.trainer.value == ValueConfig()
    assert config.lora is not None
    assert config.lora.rank == 4
    assert config.engine.memory == 0.25
    assert config.rewards.terms[1].options == {"target": 6}
    assert config.data.prompt == "Answer {question}"
    assert config.seed == 3
    assert load_config(recipe, ["lora.rank=4", "lora=null"]).lora is None
    with pytest.raises(UserError, match="sharding: full cannot spread a model with LoRA"):
        load_config(recipe, ["lora={}", "sharding=full"])


def test_flags_become_overrides() -> None:
    arguments = ["r", "--rollout.num-samples", "8", "--seed=3", "--out", "x", "--trainer.truncated-is-wrong"]
    assert Train.prepare(arguments) == [
        "r",
        "rollout.num_samples=8",
        "seed=3",
        "--out",
        "x",
        "trainer.truncated_is_wrong=true",
    ]
    assert Train.prepare(["r", "--trainer.recompute-activations", "--dry-run"]) == [
        "r",
        "trainer.recompute_activations=true",
        "--dry-run",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "recipe: none is given"),
        (["seed=3"], "seed=3: no recipe comes before it"),
        (["quickstar"], "recipe: 'quickstar' is unknown; did you mean quickstart-"),
        (["quickstart-tstar", "--resume", "x"], "quickstart-tstar: the settings of x are its own"),
        (["--resume", "nowhere"], "nowhere: is no run"),
        (["--resume", "nowhere", "--seed", "3"], "seed=3"),
        (["quickstart-tstar", "--model", "/nowhere"], "/nowhere: no such directory"),
    ],
)
def test_commands_that_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


# -- documentation -----------------------------------------------------------------------------


def test_every_setting_has_a_docstring() -> None:
    missing = [s.name for s in list_settings() if not s.text and s.section is None]
    assert missing == []


def test_the_reference_is_up_to_date() -> None:
    """`python -m tstar.config.reference > docs/config.md` after a change of settings."""
    assert (REPOSITORY / "docs/config.md").read_text(encoding="utf-8") == to_markdown()


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = set(re.findall(r"--([a-z][\w.-]*)", shown.replace("│", " ")))
    wanted = {name.replace("_", "-") for name in leaves(COMPLETE)}
    assert wanted - flags == set()
    words = " ".join(shown.replace("│", " ").split())
    assert "Responses to each of them: the group that an advantage is computed over." in words
    assert docstrings(type(COMPLETE.rollout))["num_samples"] in words


def leaves(record: Any, path: str = "") -> list[str]:
    """The full names of the settings of a record and of those in it."""
    found = []
    for field in fields(record):
        value, name = getattr(record, field.name), f"{path}{field.name}"
        entries = value.items() if isinstance(value, dict) else enumerate(value) if is_many(value) else ()
        if is_dataclass(value):
            found += leaves(value, f"{name}.")
        elif is_many(value) or (isinstance(value, dict) and value):
            for key, entry in entries:
                found += leaves(entry, f"{name}.{key}.") if is_dataclass(entry) else [f"{name}.{key}"]
        else:
            found.append(name)
    return found


def is_many(value: Any) -> bool:
    return isinstance(value, tuple) and any(map(is_dataclass, value))


def test_documented_is_train_with_settings() -> None:
    assert issubclass(Documented, Train)
    assert isinstance(Documented().settings, RunConfig)


def test_help_of_the_program_knows_no_torch() -> None:
    code = "import sys, tstar.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_tiny_runs_are_configurations(tmp_path: Path) -> None:
    assert tiny_config(tmp_path).stages[1].block_size == 8
