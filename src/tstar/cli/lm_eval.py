"""`tstar lm-eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True)
class LmEval:
    """Run the lm-evaluation-harness: its own command line, with the model type tstar as the default.

        tstar lm-eval --model_args pretrained=MODEL,block_size=8 --tasks gsm8k

    Everything behind `lm-eval` goes to lm_eval as it stands: `tstar lm-eval run --help` shows its options,
    docs/lm-eval.md those of the model. It needs pip install 'tstar[eval]'.
    """

    arguments: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ARGUMENTS")] = ()
    """What lm_eval is given."""

    def run(self) -> int | None:
        from tstar import harness

        try:
            harness.main(self.arguments)
        except SystemExit as leaving:  # argparse has printed its help (0) or a usage error (2)
            return leaving.code if isinstance(leaving.code, int) else 0
        return None
