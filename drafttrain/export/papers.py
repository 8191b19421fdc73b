"""BibTeX of the papers that a drafter rests on, for model cards."""

EDD = """@misc{edd_pct,
  title  = {Faster Speculative Decoding via Effective Draft Decoder with Pruned Candidate Tree},
  author = {Anonymous},
  note   = {ACL submission}
}"""
C2T = """@misc{c2t,
  title  = {{C2T}: A Classifier-Based Tree Construction Method in Speculative Decoding},
  author = {Feiye Huo and Jianchao Tan and Kefeng Zhang and Xunliang Cai and Shengli Sun},
  year   = {2025}
}"""
SELF_DRAFT = """@inproceedings{self_draft,
  title     = {Multi-Branch Self-Drafting for {LLM} Inference Acceleration},
  author    = {Zipeng Gao and Qingrong Xia and Tong Xu and Xinyu Duan and Zhi Zheng and Zhefeng Wang and
               Enhong Chen},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  year      = {2025}
}"""
SPECULATIVE = """@inproceedings{speculative_decoding,
  title     = {Fast Inference from Transformers via Speculative Decoding},
  author    = {Yaniv Leviathan and Matan Kalman and Yossi Matias},
  booktitle = {International Conference on Machine Learning},
  year      = {2023},
  pages     = {19274--19286}
}"""
EAGLE = """@inproceedings{eagle,
  title     = {{EAGLE}: Speculative Sampling Requires Rethinking Feature Uncertainty},
  author    = {Yuhui Li and Fangyun Wei and Chao Zhang and Hongyang Zhang},
  booktitle = {International Conference on Machine Learning},
  year      = {2024}
}"""
EAGLE2 = """@inproceedings{eagle2,
  title     = {{EAGLE-2}: Faster Inference of Language Models with Dynamic Draft Trees},
  author    = {Yuhui Li and Fangyun Wei and Chao Zhang and Hongyang Zhang},
  booktitle = {Empirical Methods in Natural Language Processing},
  year      = {2024}
}"""
MEDUSA = """@misc{medusa,
  title  = {Medusa: Simple {LLM} Inference Acceleration Framework with Multiple Decoding Heads},
  author = {Tianle Cai and Yuhong Li and Zhengyang Geng and Hongwu Peng and Jason D. Lee and Deming Chen and
            Tri Dao},
  note   = {arXiv:2401.10774},
  year   = {2024}
}"""

DRAFTER = {
    "edd": EDD,
    "vdm": SPECULATIVE,
    "causal_lm": SPECULATIVE,
    "eagle": EAGLE,
    "medusa": MEDUSA,
}  # by its kind
TREE = {"pct": EDD, "eagle2": EAGLE2, "c2t": C2T, "c2t_chain": C2T, "ngram": SELF_DRAFT}  # by its policy


def papers(kind: str, tree: str | None, classifier: bool, ngrams: bool) -> list[str]:
    """BibTeX entries, each once: the drafter's own, its tree's, and those of what else the bundle holds.

    Args:
        kind: of the drafter; one that is not known rests on nothing.
        tree: the policy that the bundle recommends.
    """
    names = [part.partition(":")[0] for part in (tree or "").split("+")]
    found = [DRAFTER.get(kind), *(TREE.get(name) for name in names)]
    found += [C2T if classifier else None, SELF_DRAFT if ngrams else None]
    return list(dict.fromkeys(entry for entry in found if entry))
