"""Run a rank of `drafttrain pipeline`, for hosts on which torchrun starts the ranks.

torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST --master-port 29500 \
    scripts/pipeline.py --config recipes/pipeline/smollm2-2.yaml
"""

import argparse
import sys

from drafttrain.run.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="YAML file")
    args, overrides = parser.parse_known_args()
    sys.exit(main(["pipeline", args.config, *overrides]))
