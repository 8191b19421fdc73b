"""The files with which transformers runs a drafter from its repository:

model.generate(**inputs, custom_generate="user/drafter", trust_remote_code=True)
"""

from drafttrain.bundle_files import GENERATE, REQUIREMENTS

TEXT = '''"""Drafted decoding with this drafter: the target's own output, in fewer of its forwards.

model.generate(**inputs, custom_generate={name}, trust_remote_code=True)
"""

try:
    from drafttrain import generate_of_repository
except ImportError as error:
    raise ImportError(
        f"drafttrain: must be installed ({{error}}); install it from a clone of its repository"
    ) from error

DRAFTER = {drafter!r}  # None in a folder: give drafter="FOLDER"


def generate(model, drafter=DRAFTER, **arguments):
    """Take the place of `model.generate`; see drafttrain.generate for what it honours."""
    return generate_of_repository(model, drafter, **arguments)
'''

# A comment alone: for a named package that is missing transformers shows its own error, not the one above,
# and pip would take any package of that name.
NEEDED = "# drafttrain, from a clone of its repository: pip install -e FOLDER\n"


def remote_files(repo: str | None) -> dict[str, bytes]:
    """Return the contents of the files by name.

    Args:
        repo: Hub id; None in a bundle that is not published.
    """
    name = f'"{repo}"' if repo else '"FOLDER", drafter="FOLDER"'
    return {GENERATE: TEXT.format(name=name, drafter=repo).encode(), REQUIREMENTS: NEEDED.encode()}
