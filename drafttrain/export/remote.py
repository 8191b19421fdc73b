"""The files with which transformers runs a drafter from its repository:

model.generate(**inputs, custom_generate="user/drafter", trust_remote_code=True)
"""

from drafttrain.bundle_files import GENERATE, REQUIREMENTS

TEXT = '''"""Drafted decoding with this drafter: the target's own output, in fewer of its forwards.

    model.generate(**inputs, custom_generate={name}, trust_remote_code=True)
"""

from drafttrain import generate_of_repository

DRAFTER = {drafter!r}  # None in a folder: give drafter="FOLDER"


def generate(model, drafter=DRAFTER, **arguments):
    """Take the place of `model.generate`; see drafttrain.generate for what it honours."""
    return generate_of_repository(model, drafter, **arguments)
'''


def remote_files(repo: str | None) -> dict[str, bytes]:
    """Return the contents of the files by name.

    Args:
        repo: Hub id; None in a bundle that is not published.
    """
    name = f'"{repo}"' if repo else '"FOLDER", drafter="FOLDER"'
    return {GENERATE: TEXT.format(name=name, drafter=repo).encode(), REQUIREMENTS: b"drafttrain\n"}
