"""`tstar doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Doctor:
    """Show what this machine has, how tstar will use it, and what stands in the way."""

    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        from rich.console import Console

        from tstar import doctor

        report = doctor.examine()
        if self.json:
            print(doctor.to_json(report))
        else:
            Console().print(doctor.to_table(report))
