"""Whether a tokenizer tells token types, by the class of transformers that a folder names for it.

transformers itself is not asked: to import its classes takes seconds.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from eet_lab.models.checkpoint import read_json

TYPED = {
    *("BertTokenizer", "CanineTokenizer", "ConvBertTokenizer", "DPRContextEncoderTokenizer"),
    *("DPRQuestionEncoderTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FNetTokenizer"),
    *("LayoutLMTokenizer", "LayoutLMv2Tokenizer", "LxmertTokenizer", "MarkupLMTokenizer", "MobileBertTokenizer"),
    *("SqueezeBertTokenizer", "TapasTokenizer"),
}
"""The classes of transformers 5 with token_type_ids in `model_input_names`, its names for BertTokenizer among them."""
TYPED_IN_4 = {
    *("AlbertTokenizer", "BertJapaneseTokenizer", "BertweetTokenizer", "CTRLTokenizer", "CpmTokenizer"),
    *("FlaubertTokenizer", "FunnelTokenizer", "HerbertTokenizer", "MgpstrTokenizer", "PhobertTokenizer"),
    *("PreTrainedTokenizer", "RealmTokenizer", "RemBertTokenizer", "RoCBertTokenizer", "RoFormerTokenizer"),
    *("SplinterTokenizer", "XLMTokenizer", "XLNetTokenizer"),
}
"""Those besides that have it in transformers 4, where a class that says nothing has it."""
OF_FAMILY = {"bert": "BertTokenizer"}
"""The class of a folder that names none; the other families' have no token types."""


def tells_types(folder: Path, family: str) -> bool:
    """Whether `AutoTokenizer` reads token types from this folder: what its settings list, else what its class does."""
    settings, config = (
        read_json(path) if path.exists() else {} for path in (folder / "tokenizer_config.json", folder / "config.json")
    )
    names = settings.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    name = settings.get("tokenizer_class") or config.get("tokenizer_class") or OF_FAMILY.get(family)
    is_old = version("transformers").split(".")[0] == "4"
    return str(name).removesuffix("Fast") in (TYPED | TYPED_IN_4 if is_old else TYPED)
