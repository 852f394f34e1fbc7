"""Sources of problems, what is wrong with them in one line, draws by key, prompts."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tstar.data import MATH_PROMPT, RAW_PROMPT, ProblemSet, PromptTemplate, load_problems, prompt_template
from tstar.data.problems import Problem
from tstar.data.sources import last_boxed
from tstar.errors import UserError
from tstar.tasks.chain_model import chain_tokenizer

ROW = {"question": "1+1?", "answer": "2"}


def write_lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def numbered(count: int) -> ProblemSet:
    return ProblemSet("numbers", tuple(Problem(f"{i}?", str(i), i % 5 + 1) for i in range(count)))


# -- plain files -------------------------------------------------------------------------------


def test_a_file_of_ours(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {**ROW, "level": 3, "subject": "sums"},
        "\n",
        {"problem": "π?", "answer": 3, "solution": "about 3", "unique_id": "pi", "level": "Level 5"},
    )
    problems = load_problems(str(path))
    assert (problems.name, len(problems), problems.num_without_answer) == ("p.jsonl", 2, 0)
    assert problems.prompt is MATH_PROMPT
    assert problems.problems == (
        Problem("1+1?", "2", 3, "p.jsonl/0", None, {"subject": "sums"}),
        Problem("π?", "3", 5, "pi", "about 3", {}),
    )
    assert problems.problems[0].fields == {"subject": "sums"}


def test_parquet_and_jsonl_say_the_same(tmp_path: Path) -> None:
    rows = [{**ROW, "level": 1.0}, {"question": "0?", "answer": "0", "level": math.nan}]
    parquet = load_problems(str(write_parquet(tmp_path / "a.parquet", rows)))
    lines = load_problems(str(write_lines(tmp_path / "a.jsonl", *rows)))
    assert [(p.question, p.answer, p.level) for p in parquet.problems] == [
        ("1+1?", "2", 1),
        ("0?", "0", None),
    ]
    assert [p.answer for p in parquet.problems] == [p.answer for p in lines.problems]
    both = load_problems(str(tmp_path))
    assert len(both) == 4
    assert len({p.id for p in both.problems}) == 4


def test_rows_without_an_answer_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": answer} for answer in ("", " ", None, "0", 0)]
    problems = load_problems(str(write_lines(tmp_path / "p.jsonl", *rows)))
    assert ([p.answer for p in problems.problems], problems.num_without_answer) == (["0", "0"], 3)


def test_training_keeps_solutions_without_an_answer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", {"question": "?", "solution": "QED"}, {**ROW, "answer": ""}, ROW)
    problems = load_problems(str(path), needs_answer=False)
    assert [(p.answer, p.solution) for p in problems.problems] == [("", "QED"), ("2", None)]
    assert problems.num_without_answer == 1
    assert load_problems(str(path)).num_without_answer == 2


def test_a_solution_gives_its_boxed_answer(tmp_path: Path) -> None:
    rows = [
        {"problem": "?", "solution": r"not \boxed{1} but \boxed{\frac{1}{2}}."},
        {"problem": "?", "solution": "no"},
    ]
    problems = load_problems(str(write_lines(tmp_path / "p.jsonl", *rows)))
    assert (problems.problems[0].answer, problems.num_without_answer) == (r"\frac{1}{2}", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{}", ""),
        (r"\boxed{a}{b}", "a"),
        (r"\boxed{a", None),
        (r"\boxed{{{x}}}", "{{x}}"),
        ("boxed{1}", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


# -- bad data ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "1+1?", "answer": 2\n', r"p.jsonl:2: not valid JSON \(Expecting ',' delimiter"),
        ("[1]\n", r"p.jsonl:2: a list where an object is expected; write \{"),
        ({"question": "?"}, r"p.jsonl:2: answer is missing \(it has question\)"),
        ({"prompt": "?", "answer": "2"}, r"p.jsonl:2: question is missing \(it has prompt, answer\)"),
        ({"question": 7, "answer": "2"}, r"p.jsonl:2: question: 7 is not text; correct the row"),
        ({"question": "  ", "answer": "2"}, r'p.jsonl:2: question: "  " is not text'),
        ({"question": "?", "answer": ["2"]}, r'p.jsonl:2: answer: \["2"\] is not text or a number'),
        ({"question": "?", "answer": True}, "p.jsonl:2: answer: true is not text or a number"),
        ({"question": "?", "answer": math.inf}, "p.jsonl:2: answer: Infinity is not text or a number"),
        ({**ROW, "level": "hard"}, 'p.jsonl:2: level: "hard" is not a whole number'),
        ({**ROW, "level": 2.5}, "p.jsonl:2: level: 2.5 is not a whole number"),
        ({**ROW, "level": math.inf}, "p.jsonl:2: level: Infinity is not a whole number"),
        ({**ROW, "solution": 3}, "p.jsonl:2: solution: 3 is not text"),
        ({**ROW, "id": "a"}, "p.jsonl:2: id 'a' stands in an earlier row too"),
        ("[" * 100_000 + "\n", "p.jsonl:2: not valid JSON"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write_lines(tmp_path / "p.jsonl", {**ROW, "id": "a"}, row)
    with pytest.raises(UserError, match=message) as caught:
        load_problems(str(path))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl:2: not valid JSON \('utf-8' codec can't decode"):
        load_problems(str(path))


def test_a_byte_order_mark_is_none_of_our_business(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode())
    assert len(load_problems(str(path))) == 1


def test_empty_and_absent_files(tmp_path: Path) -> None:
    for source, message in [
        (write_lines(tmp_path / "empty.jsonl"), r"empty.jsonl is empty: it has no rows"),
        (
            write_lines(tmp_path / "none.jsonl", {"question": "?", "answer": ""}),
            "none of its 1 rows has an answer",
        ),
        (write_parquet(tmp_path / "none.parquet", [{"question": "?", "answer": None}]), "none of its 1 rows"),
        (write_lines(tmp_path / "broken.parquet", "PAR?"), "broken.parquet: no readable parquet file"),
        (tmp_path / "absent.jsonl", "absent.jsonl: no such file or directory"),
        (write_lines(tmp_path / "p.csv", "a,b\n"), r"p.csv: no .jsonl or .parquet file"),
        (tmp_path / "directory", "directory: no .jsonl or .parquet file"),
    ]:
        (tmp_path / "directory").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            load_problems(str(source))


def test_a_bad_row_of_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [ROW, {"question": None, "answer": "2"}])
    with pytest.raises(UserError, match=r"p\.parquet row 2: question: null is not text"):
        load_problems(str(path))


@pytest.mark.parametrize("source", ["math501", "chain", "nothing here", "gsm8k@", ""])
def test_unknown_sources(source: str) -> None:
    with pytest.raises(UserError, match=r"is no preset and no file.*use one of math500, gsm8k"):
        load_problems(source)


# -- presets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "repository"),
    [("gsm8k", "openai/gsm8k"), ("math-train", "DigitalLearningGmbH/MATH-lighteval")],
)
def test_offline_says_what_to_do_instead(source: str, repository: str) -> None:
    with pytest.raises(UserError, match=rf"{repository} cannot be loaded \(.*give {source}:DIR$"):
        load_problems(source)
    with pytest.raises(UserError, match=r"Nobody/nothing cannot be loaded .*give DIR$"):
        load_problems("Nobody/nothing@test")


GSM8K = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\nso 1<<1=1>>.\n#### 1,234"}


def test_gsm8k_as_its_repository_has_it(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main" / "test-00000-of-00001.parquet", [GSM8K])
    write_parquet(tmp_path / "main" / "train-00000-of-00001.parquet", [GSM8K] * 2)
    write_parquet(tmp_path / "socratic" / "test-00000-of-00001.parquet", [GSM8K] * 3)
    problems = load_problems(f"gsm8k:{tmp_path}")
    assert problems.name == "gsm8k"
    (problem,) = problems.problems
    assert problem.answer == "1234"
    assert problem.solution == "48/2 = 24\nso 1.\n\\boxed{1234}"
    assert len(load_problems(f"gsm8k@train:{tmp_path}")) == 2


def test_several_shards(tmp_path: Path) -> None:
    for shard in range(2):
        name = f"train-0000{shard}-of-00002.parquet"
        row = {
            "problem": "?",
            "answer": str(shard),
            "generations": ["long"],
            "uuid": f"u{shard}",
            "source": "x",
        }
        write_parquet(tmp_path / "data" / name, [row])
        write_parquet(tmp_path / "extended" / name, [row])
    problems = load_problems(f"openr1-math:{tmp_path}").problems
    assert [(p.answer, p.id, p.fields) for p in problems] == [
        ("0", "u0", {"source": "x"}),
        ("1", "u1", {"source": "x"}),
    ]
    with pytest.raises(UserError, match="gives its problems no level"):
        load_problems(f"openr1-math:{tmp_path}").of_levels(3, 5)


@pytest.mark.parametrize(
    ("written", "answer"), [("025", "25"), ("000", "0"), ("120", "120"), (" 7 ", "7"), (80, "80")]
)
def test_aime_answers_lose_their_zeros(tmp_path: Path, written: object, answer: str) -> None:
    path = write_lines(
        tmp_path / "aime24.jsonl", {"question": "?", "answer": written}, {"question": "?", "answer": ""}
    )
    problems = load_problems(f"aime24:{path}")
    assert ([p.answer for p in problems.problems], problems.num_without_answer) == ([answer], 1)


def test_a_directory_of_several_data_sets(tmp_path: Path) -> None:
    write_lines(tmp_path / "gsm8k_test.jsonl", ROW)
    write_lines(tmp_path / "gsm8k_train.jsonl", ROW, ROW)
    write_lines(tmp_path / "math500.jsonl", ROW, ROW, ROW)
    sources = {"gsm8k": 1, "gsm8k@train": 2, "math500": 3}
    assert {name: len(load_problems(f"{name}:{tmp_path}")) for name in sources} == sources
    with pytest.raises(
        UserError, match=r"none of its 3 files is called train-\*, aime24_train or aime24; give"
    ):
        load_problems(f"aime24:{tmp_path}")


def test_math_as_published(tmp_path: Path) -> None:
    rows = [
        {"problem": "?", "level": "Level 4", "type": "Algebra", "solution": r"So \boxed{2}."},
        {"problem": "?", "level": "Level ?", "type": "Geometry", "solution": r"So \boxed{3}."},
    ]
    problems = load_problems(f"math-train:{write_parquet(tmp_path / 'train.parquet', rows)}")
    assert [(p.answer, p.level, p.fields) for p in problems.problems] == [
        ("2", 4, {"type": "Algebra"}),
        ("3", None, {"type": "Geometry"}),
    ]
    assert len(problems.of_levels(3, 5)) == 1
    with pytest.raises(UserError, match=r"no problem of level 1 to 3; it has \[4\]"):
        problems.of_levels(1, 3)


@pytest.mark.parametrize(
    ("source", "count", "dropped"),
    [
        ("math500:{}", 500, 0),
        ("gsm8k:{}", 1319, 0),
        ("gsm8k@train:{}", 7473, 0),
        ("aime24:{}", 30, 0),
        ("math-train:{}/math_level3to5.jsonl", 8521, 2),
        ("{}/math_level3to5.jsonl", 8521, 2),
    ],
)
def test_the_real_files(shared: Path, source: str, count: int, dropped: int) -> None:
    problems = load_problems(source.format(shared / "data"))
    assert (len(problems), problems.num_without_answer) == (count, dropped)
    for problem in problems.problems:
        assert problem.question.strip()
        assert problem.answer.strip() == problem.answer != ""
        if "gsm8k" in source:
            assert float(problem.answer) is not None
        if "aime24" in source:
            assert problem.answer == str(int(problem.answer))
        if "math" in source:
            assert problem.level in range(1, 6)


# -- draws -------------------------------------------------------------------------------------


def test_a_pass_has_no_problem_twice() -> None:
    problems = numbered(23)
    for start in (0, 5):  # updates 0-4 are one pass of 23 // 4 = 5 updates, 5-9 the next
        drawn = [p.answer for step in range(start, start + 5) for p in problems.draw(1, step, 4)]
        assert len(drawn) == len(set(drawn)) == 20
    passes = [[p.answer for p in problems.draw(1, step, 23)] for step in range(3)]
    assert all(sorted(once) == sorted(passes[0]) for once in passes)
    assert passes[0] != passes[1] != passes[2]


def test_draws_are_a_function_of_seed_and_update() -> None:
    problems = numbered(50)
    assert problems.draw(3, 11, 8) == problems.draw(3, 11, 8)
    assert problems.draw(3, 11, 8) != problems.draw(4, 11, 8)
    # Written down: a resumed run on another machine draws these too.
    assert [p.answer for p in problems.draw(3, 11, 4)] == ["16", "14", "36", "7"]


def test_every_problem_comes_as_often() -> None:
    problems = numbered(10)
    counts = Counter(p.answer for step in range(3000) for p in problems.draw(0, step, 3))
    assert set(counts) == {str(i) for i in range(10)}
    # 1000 passes, each leaving out 1 of 10: 900 +- 9.5 (one standard deviation).
    assert max(abs(count - 900) for count in counts.values()) < 40


def test_more_than_there_are() -> None:
    with pytest.raises(UserError, match="numbers has 10 problems, an update draws 11; draw at most 10"):
        numbered(10).draw(0, 0, 11)


def test_the_first_few() -> None:
    assert [p.answer for p in numbered(10).first(3).problems] == ["0", "1", "2"]
    assert len(numbered(10).first(99)) == 10
    with pytest.raises(UserError, match="limit: 0 problems"):
        numbered(10).first(0)


# -- prompts -----------------------------------------------------------------------------------


def test_the_papers_instruction_goes_behind_the_question(shared: Path) -> None:
    from tstar.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shared / "tokenizers" / "sdar")
    ids = MATH_PROMPT.render(tokenizer, "What is {x} + \\frac{1}{2}?")
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nWhat is {x} + \\frac{1}{2}?\nPlease reason step by step, and put your final "
        "answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = PromptTemplate("{question}", system="Be brief.").render(tokenizer, "1?")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_raw_prompts_pass_no_template() -> None:
    tokenizer = chain_tokenizer()
    assert tokenizer.decode(RAW_PROMPT.render(tokenizer, "1+2=")) == "1+2="
    assert tokenizer.decode(PromptTemplate("#{question}#", is_chat=False).render(tokenizer, "1=")) == "#1=#"


def test_templates_by_name_and_by_text() -> None:
    assert prompt_template("math") is MATH_PROMPT
    assert prompt_template("raw") is RAW_PROMPT
    assert prompt_template("Solve {question}!") == PromptTemplate("Solve {question}!")
    with pytest.raises(UserError, match=r"^prompt: 'maths' is unknown; use math, chat, raw"):
        prompt_template("maths")


def test_templates_without_sense() -> None:
    with pytest.raises(UserError, match=r"prompt template: 'Solve it' has no \{question\}"):
        PromptTemplate("Solve it")
    with pytest.raises(UserError, match="a raw template has no system message"):
        PromptTemplate("{question}", is_chat=False, system="Be brief.")
