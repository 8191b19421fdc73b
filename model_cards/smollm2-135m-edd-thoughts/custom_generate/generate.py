"""Drafted decoding with this drafter: the target's own output, in fewer of its forwards.

model.generate(**inputs, custom_generate="FOLDER", drafter="FOLDER", trust_remote_code=True)
"""

from drafttrain import generate_of_repository

DRAFTER = None  # None in a folder: give drafter="FOLDER"


def generate(model, drafter=DRAFTER, **arguments):
    """Take the place of `model.generate`; see drafttrain.generate for what it honours."""
    return generate_of_repository(model, drafter, **arguments)
