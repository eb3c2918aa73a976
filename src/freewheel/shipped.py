"""Files that come with Freewheel: `recipes/` with its models and prompts.

They lie at the root of a checkout, and inside the installed package. A relative path in a recipe is
looked for in the current folder first and then beside `recipes/`, so that `recipes/tiny` means the
shipped model wherever one stands.
"""

from pathlib import Path


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
