"""The place of a run's target, as recorded by the stage fetch-target."""

from pathlib import Path

from drafttrain.run.target import PLACE
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable


def recorded_target(corpus: str | Path) -> str:
    """Return the target of the run that a corpus folder belongs to.

    Raises:
        UserError: there is no such folder, or it is in no run.
    """
    if not (Path(corpus) / "corpus.json").is_file():
        raise UserError(f"{corpus}: no corpus here; give the folder that drafttrain corpus wrote")
    if (place := recorded_place(Path(corpus).parent / "target")) is None:
        raise UserError(f"{corpus}: must be in a run's folder that names its target; give it with --target")
    return str(place)


def recorded_place(folder: Path) -> Path | None:
    """Return the path of the target from the folder of a run's stage fetch-target; None if not recorded.

    Raises:
        UserError: the record is damaged.
    """
    record = folder / PLACE
    if not record.exists():
        return None
    with usable(record, "run the stage fetch-target again"):
        return Path(read_json(record)["place"])
