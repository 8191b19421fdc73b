"""Train the drafter of a recipe, on one process or several, after `drafttrain run RECIPE --until collect`.

deepspeed scripts/train_drafter.py --config recipes/quickstart.yaml --deepspeed recipes/deepspeed/zero2.json
torchrun --nproc-per-node 4 scripts/train_drafter.py --config recipes/quickstart.yaml
python scripts/train_drafter.py --config recipes/quickstart.yaml --training.lr 1e-3
"""

import argparse
import sys

from drafttrain.run.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="YAML file")
    parser.add_argument("--deepspeed", metavar="JSON", help="sets training.deepspeed")
    # appended by the launcher, which sets RANK as well
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.deepspeed:
        overrides += ["--training.deepspeed", args.deepspeed]
    sys.exit(main(["train", args.config, *overrides]))
