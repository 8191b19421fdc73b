"""The growth policies by name: module in `drafttrain.trees`, class and, for a variant, its method.

Named rather than imported: recipes are checked before torch is loaded, and a policy needs no other's module.
"""

POLICIES = {
    "chain": "chain.ChainPolicy",
    "static": "static.StaticPolicy.from_k_config",
    "paths": "static.StaticPolicy.from_text",
    "vct": "static.StaticPolicy.vanilla",
    "eagle1": "static.StaticPolicy.eagle1",
    "cape": "cape.CapePolicy",
    "eagle2": "eagle2.Eagle2Policy",
    "pct": "pct.PctPolicy",
    "timed": "timed.TimedPolicy",
    "drawn": "sampled.SampledTreePolicy",
    "c2t": "c2t.C2tPolicy",
    "c2t_chain": "c2t.C2tPolicy.chain",
    "joint": "c2t.C2tPolicy.joint",
    "dymax": "c2t.C2tPolicy.dymax",
    "dyjoint": "c2t.C2tPolicy.dyjoint",
}
NGRAM = "ngram"  # a tree of n-grams alone, by Self-Draft; `ngram+POLICY` joins them with a growth policy's
WITH_NGRAMS = (NGRAM, f"{NGRAM}+POLICY")  # further names of trees, where they can be used


def drafter_policy(tree: str) -> str:
    """Return the growth policy that the drafter of a tree uses; empty for n-grams alone."""
    return tree.partition("+")[2] if tree.partition("+")[0] == NGRAM else tree
