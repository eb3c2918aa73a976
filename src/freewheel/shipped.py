"""Files that come with Freewheel: `recipes/` with its models and prompts.

They lie at the root of a checkout, and inside the installed package. A relative path in a recipe is
looked for in the current folder first and then beside `recipes/`, so that `recipes/tiny` means the
shipped model wherever one stands.
"""

from dataclasses import replace
from pathlib import Path

from freewheel.config.sections import Config


def recipes_folder() -> Path:
    """Folder of the shipped recipes."""
    here = Path(__file__).resolve().parent
    installed = here / "recipes"
    return installed if installed.is_dir() else here.parents[1] / "recipes"


def candidates(path: str) -> tuple[Path, ...]:
    """Where a path of a configuration may lie, the first choice first. `~` is expanded."""
    wanted = Path(path).expanduser()
    if wanted.is_absolute():
        return (wanted,)
    places = (Path.cwd() / wanted, recipes_folder().parent / wanted)
    return tuple(dict.fromkeys(places))


def locate(path: str) -> Path:
    """The first of the candidates that exists; if none does, the first. Absolute."""
    found = [place for place in candidates(path) if place.exists()]
    return (found or candidates(path))[0].absolute()


def with_absolute_paths(config: Config) -> Config:
    """The configuration with all inputs named by absolute paths.

    So that workers, and a resume that is started from another folder, find the same files.
    """
    data, model = config.data, config.model
    return replace(
        config,
        data=replace(
            data,
            train_files=_absolute_files(data.train_files),
            val_files=_absolute_files(data.val_files),
        ),
        model=replace(model, path=_absolute(model.path)),
    )


def _absolute_files(files: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(files, str):
        return _absolute(files)
    return tuple(_absolute(name) for name in files)


def _absolute(name: str) -> str:
    """An empty name and one with a scheme (`package:`, `reasoning_gym:`) stay as they are."""
    return name if not name or ":" in name else str(locate(name))
