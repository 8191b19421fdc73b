"""Drafted decoding with this drafter: the target's own output, in fewer of its forwards.

model.generate(**inputs, custom_generate="FOLDER", drafter="FOLDER", trust_remote_code=True)
"""

try:
    from drafttrain import generate_of_repository
except ImportError as error:
    raise ImportError(
        f"drafttrain: must be installed ({error}); install it from a clone of its repository"
    ) from error

DRAFTER = None  # None in a folder: give drafter="FOLDER"


def generate(model, drafter=DRAFTER, **arguments):
    """Take the place of `model.generate`; see drafttrain.generate for what it honours."""
    return generate_of_repository(model, drafter, **arguments)
