"""lm-evaluation-harness: exact likelihoods, stop strings, and its own command line from end to end."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from text_models import save_chain_model
from tiny_models import make_model, make_peer
from tstar.engine import Engine, EngineConfig, Request, SamplingParams
from tstar.errors import UserError
from tstar.harness import TStarLM, score_continuations
from tstar.model.attention import prepare
from tstar.model.layout import PackedLayout
from tstar.model.transformer import LanguageModel
from tstar.partition import PartitionRule
from tstar.unmask import UnmaskPolicy

RULES = [
    PartitionRule(1),
    PartitionRule(4),
    PartitionRule(4, 2),
    PartitionRule(5, 3, "sequence"),
    PartitionRule(8, 0, "sequence"),
]


# -- likelihood --------------------------------------------------------------------------------


@torch.no_grad()
def left_to_right(
    model: LanguageModel, context: list[int], continuation: list[int], rule: PartitionRule
) -> tuple[float, bool]:
    """The definition, a forward for each token: what is behind it in its block is masked."""
    mask = model.config.mask_token_id
    assert mask is not None
    total, is_greedy = 0.0, True
    for index, token in enumerate(continuation):
        place = len(context) + index
        partition = rule.cut(len(context), index + 1 + rule.block_size)
        stop = partition.block(partition.block_id(place)).stop
        text = [*context, *continuation[:index]]
        text += [mask] * (stop - len(text))
        layout = PackedLayout.clean([rule.cut(len(context), stop - len(context))])
        logits = model.logits(model(torch.tensor(text), prepare(layout)))[place].double()
        logits[mask] = -torch.inf
        total += float(torch.log_softmax(logits, dim=-1)[token])
        is_greedy &= int(logits.argmax()) == token
    return total, is_greedy


@pytest.mark.parametrize("rule", RULES)
def test_block_likelihood_is_its_definition(rule: PartitionRule) -> None:
    model = make_model("sdar")
    rng = np.random.default_rng(0)
    context = rng.integers(0, 90, 7).tolist()
    pairs = [
        (rng.integers(0, 90, n).tolist(), rng.integers(0, 90, m).tolist())
        for n, m in [(1, 1), (3, 4), (6, 9), (9, 17), (12, 2)]
    ]
    pairs += [(context, rng.integers(0, 90, m).tolist()) for m in (1, 3, 6)]  # one context, several choices
    for pair, score in zip(pairs, score_continuations(model, pairs, rule), strict=True):
        expected, is_greedy = left_to_right(model, *pair, rule)
        assert score.log_prob == pytest.approx(expected, abs=2e-4)
        assert score.is_greedy == is_greedy


@pytest.mark.parametrize("rule", RULES)
def test_it_is_what_the_engine_would_decode(rule: PartitionRule) -> None:
    """Its probability, under the sequential policy at temperature 1; and greedy decoding is greedy."""
    model = make_model("sdar")
    engine = Engine(model, EngineConfig(memory=1 << 28))
    prompt = [5, 6, 7, 8, 9]
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(11, temperature, unmask=UnmaskPolicy("sequential"))
        (decoded,) = engine.generate([Request(np.array(prompt), rule, sampling, seed=3)])
        # The engine's last block ends with max_tokens; all blocks before it are as in the definition.
        length = int(decoded.partition.response_slices[-1].start)
        (score,) = score_continuations(model, [(prompt, decoded.response_ids[:length].tolist())], rule)
        assert score.log_prob == pytest.approx(float(decoded.log_probs[:length].sum()), abs=2e-4)
        assert score.is_greedy == (temperature == 0)


@pytest.mark.parametrize("model_type", ["sdar", "qwen3"])
def test_likelihoods_are_a_consistent_distribution(model_type: str) -> None:
    """Over all continuations of a length they sum to 1, and a prefix's is the sum over what may follow."""
    model = make_model(model_type, vocab_size=7, **({"mask_token_id": 6} if model_type == "sdar" else {}))
    tokens = range(6 if model_type == "sdar" else 7)
    rule = PartitionRule(2 if model_type == "sdar" else 1)
    context = [1, 2, 3]
    totals = {}
    for length in (1, 2, 3):
        texts = [list(text) for text in itertools.product(tokens, repeat=length)]
        scores = score_continuations(model, [(context, text) for text in texts], rule)
        totals |= {tuple(t): np.exp(s.log_prob) for t, s in zip(texts, scores, strict=True)}
        assert sum(np.exp(s.log_prob) for s in scores) == pytest.approx(1, abs=1e-4)
    for text, probability in totals.items():
        if len(text) < 3:
            assert sum(totals[(*text, t)] for t in tokens) == pytest.approx(probability, rel=1e-3)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_ar_likelihood_is_the_usual_one(kind: str, tmp_path: Path) -> None:
    """... as transformers computes it."""
    from tstar.model.checkpoint import load_model

    peer = make_peer(kind)
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 97, n).tolist(), rng.integers(0, 97, m).tolist())
        for n, m in [(1, 1), (5, 3), (2, 9)]
    ]
    greedy = peer.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    pairs.append(([1, 2, 3], greedy[0, 3:].tolist()))
    for (context, continuation), score in zip(
        pairs, score_continuations(model, pairs, PartitionRule(1)), strict=True
    ):
        with torch.no_grad():
            logits = peer(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        labels = torch.tensor(continuation)
        assert score.log_prob == pytest.approx(float(log_probs.gather(1, labels[:, None]).sum()), abs=2e-4)
        assert score.is_greedy == bool((logits.argmax(dim=-1) == labels).all())
    assert score.is_greedy


# -- the model type ----------------------------------------------------------------------------


class Ask:
    """A request as lm-eval makes them."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain_model(tmp_path_factory.mktemp("models") / "b4", block_size=4)


def test_generation_ends_before_the_first_stop(directory: Path) -> None:
    lm = TStarLM(str(directory), block_size=8, batch_size="auto")
    asks = [Ask(f"{n}+6=", {"until": [], "max_gen_toks": 24}) for n in range(10)]
    whole = lm.generate_until(asks, disable_tqdm=True)
    assert whole == lm.generate_until(asks, disable_tqdm=True)  # greedy
    text = max(whole, key=len)
    stop = text[len(text) // 2 :][:2]
    cut = lm.generate_until(
        [Ask(ask.args[0], {"until": [stop], "max_gen_toks": 24}) for ask in asks], disable_tqdm=True
    )
    assert cut == [each.partition(stop)[0] for each in whole]
    assert cut != whole


def test_sampled_repeats_differ_and_are_repeatable(directory: Path) -> None:
    asks = [Ask("7+6=", {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0})] * 4
    first = TStarLM(str(directory), seed=1).generate_until(asks, disable_tqdm=True)
    assert len(set(first)) > 1
    assert first == TStarLM(str(directory), seed=1).generate_until(asks, disable_tqdm=True)
    assert first != TStarLM(str(directory), seed=2).generate_until(asks, disable_tqdm=True)


def test_rolling_predicts_every_token_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = TStarLM(str(directory), block_size=4)
    (total,) = lm.loglikelihood_rolling([Ask("7+6=3;")], disable_tqdm=True)
    expected, _ = left_to_right(lm.model, [lm.prefix_token_id], lm.tok_encode("7+6=3;"), PartitionRule(4))
    assert total == pytest.approx(expected, abs=2e-4)
    scored: list[tuple[list[int], list[int]]] = []

    def record(pairs: list[Any], **_: Any) -> list[tuple[float, bool]]:
        scored.extend((context, continuation) for _, context, continuation in pairs)
        return [(-1.0, True)] * len(pairs)

    monkeypatch.setattr(lm, "_loglikelihood_tokens", record)
    long = "7+6=3;" * 200  # more than the model has positions
    assert lm.loglikelihood_rolling([Ask(long)], disable_tqdm=True) == [-3.0]
    assert [token for _, continuation in scored for token in continuation] == lm.tok_encode(long)
    for context, continuation in scored:
        assert len(context) + len(continuation) + 4 <= lm.model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocksize": 4}, "model_args: blocksize is unknown"),
        ({"dtype": "int8"}, "model_args: dtype: 'int8' is unknown"),
        ({"unmask": "dynamic"}, "confidence_threshold: missing"),
    ],
)
def test_bad_model_args_are_named(directory: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TStarLM(str(directory), **arguments)


def test_bad_generation_arguments_are_named(directory: Path) -> None:
    lm = TStarLM(str(directory))
    with pytest.raises(UserError, match="generation_kwargs: num_beams is unknown"):
        lm.generate_until([Ask("1+1=", {"until": [], "num_beams": 4})])
    with pytest.raises(UserError, match="max_gen_toks: 600 tokens leave no room"):
        lm.generate_until([Ask("1+1=", {"until": [], "max_gen_toks": 600})])


# -- from end to end ---------------------------------------------------------------------------

TASKS = {
    "local_generate": """
        output_type: generate_until
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: [";"], max_gen_toks: 12}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
    "local_choice": """
        output_type: multiple_choice
        doc_to_choice: ["1", "2", "3"]
        doc_to_target: 0
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
    """,
    "local_rolling": """
        output_type: loglikelihood_rolling
        doc_to_target: "{{question}}{{answer}}"
        metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
    """,
}


def test_the_command_line_evaluates(tmp_path: Path) -> None:
    model = save_chain_model(tmp_path / "model")
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        head = f"""
        task: {name}
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}, cache_dir: {tmp_path}/cache}}
        test_split: test
        doc_to_text: "{{{{question}}}}"
        """
        (tmp_path / f"{name}.yaml").write_text(head + body)
    arguments = (
        f"--tasks {','.join(TASKS)} --include_path {tmp_path} --output_path {tmp_path}/out --log_samples"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tstar", "lm-eval", "--model_args", f"pretrained={model}", *arguments.split()],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    record = json.loads(results.read_text())
    assert record["config"]["model"] == "tstar"
    assert record["results"]["local_rolling"]["byte_perplexity,none"] > 1
    (samples,) = (tmp_path / "out").rglob("samples_local_generate*.jsonl")
    lm = TStarLM(str(model))
    expected = lm.generate_until(
        [Ask(row["question"], {"until": [";"], "max_gen_toks": 12}) for row in rows], disable_tqdm=True
    )
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [sample["resps"][0][0] for sample in sorted(logged, key=lambda s: s["doc_id"])] == expected


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    from tstar import cli

    assert cli.main(["lm-eval", "--no-such-option", "x"]) == 2
    assert "lm-eval" in capsys.readouterr().err
