"""Problems: from files and the Hub into one record, drawn by key, turned into prompts.

A source is named by one string, and every command takes the same:

    math500   gsm8k   gsm8k@train   aime24   math-train   openr1-math     presets, from the Hub
    gsm8k@train:/data/gsm8k   math500:math500.jsonl                       a preset from local files
    problems.jsonl   problems.parquet   some/directory                    files of {question, answer, ...}
    OWNER/NAME   OWNER/NAME@SPLIT                                         any data set of the Hub

(`tstar.tasks.open_problems` adds the generated ones.) A row without a gold answer is left out and counted;
anything else that is wrong with the data stops the program and names file and line.
"""

from tstar.data.problems import (
    CHAT_PROMPT,
    MATH_PROMPT,
    PROMPTS,
    RAW_PROMPT,
    Problem,
    ProblemSet,
    ProblemSource,
    PromptTemplate,
    prompt_template,
)
from tstar.data.sources import PRESETS, Preset, load_problems

__all__ = [
    "CHAT_PROMPT",
    "MATH_PROMPT",
    "PRESETS",
    "PROMPTS",
    "RAW_PROMPT",
    "Preset",
    "Problem",
    "ProblemSet",
    "ProblemSource",
    "PromptTemplate",
    "load_problems",
    "prompt_template",
]
