"""Checkpoints as they lie on disk or on the hub: config.json, and tensors by name. Nothing in them is ever run."""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from platform import node
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from eet_lab.errors import ModelError, first_line
from eet_lab.files import check_regular, lock
from eet_lab.words import counted, some

if TYPE_CHECKING:  # whoever reads a tokenizer's files needs no torch
    from torch import Tensor

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
"""Weights of newer checkpoints, and of older ones, which are read only where there are no others, as tensors only."""
MAX_JSON_BYTES = 16 << 20
"""A config has some kilobytes, and the index of the largest checkpoints a few megabytes."""
NAMELESS = ("marian",)
"""Families whose own tokenizer in transformers reads no tokenizer.json: the one for any has to be named."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "source.spm",
    "target.spm",
)
OTHER_FILES = ("generation_config.json", "preprocessor_config.json")
INDEX = "{}.index.json"
"""What names the shards of weights, by the name of a single file."""
HUB_FILES = ["config.json", "model*.safetensors", INDEX.format(SAFE), *TOKENIZER_FILES, *OTHER_FILES]
AGAIN = "Download or save the model again."


def downloaded(name: str) -> Path:
    """The local folder of a hub model, downloaded if need be."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            older = ["pytorch_model*.bin", INDEX.format(PICKLED)]
            folder = Path(snapshot_download(name, allow_patterns=[*HUB_FILES, *older]))
        return folder
    except Exception as error:  # the hub's client raises many kinds; all mean that it is not to be had
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub ({type(error).__name__}: {first_line(error)}). "
            "Check the name and the network, or give the path of a local folder; 'demo' needs no network."
        ) from error


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """ModelError unless this is a regular file of at most so many bytes. FileNotFoundError where there is nothing."""
    check_regular(path, ModelError, AGAIN, max_bytes)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file of at most `MAX_JSON_BYTES`."""
    try:
        check_file(path, MAX_JSON_BYTES)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}; a model folder holds config.json and model.safetensors."
        ) from None
    except ModelError:  # a ValueError, too
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}. {AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {str(content)[:40]!r}, not an object; download or save the model again.")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors or pytorch_model.bin, or of their shards, on the CPU."""
    files = _files(folder, SAFE, "*.safetensors") or _files(folder, PICKLED, "pytorch_model*.bin")
    if not files:
        raise ModelError(
            f"{folder} has neither model.safetensors nor pytorch_model.bin; save the model with save_pretrained."
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= _read_file(path)
    return tensors


def _files(folder: Path, name: str, others: str) -> list[Path]:
    """The files that an index names, else the single one of this name, whatever lies beside it, else all others."""
    if (index := folder / INDEX.format(name)).exists():
        return _shards(index)
    return [folder / name] if (folder / name).exists() else sorted(folder.glob(others))


def _shards(index: Path) -> list[Path]:
    """The files that an index names, all of which are there. Errors: ModelError."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index} has no weight_map from tensors to files; download or save the model again.")
    for name in names.values():
        if Path(name).name != name or "\0" in name:
            raise ModelError(f"{index} names the file {name[:100]!r}, but shards lie beside it: names only. {AGAIN}")
    files = sorted({index.parent / name for name in names.values()})
    if missing := [path.name for path in files if not path.exists()]:
        raise ModelError(
            f"{index} names {counted(len(files), 'file')}, of which these are missing: {some(missing)}. "
            "Download what is missing into the same folder."
        )
    return files


def _read_file(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    try:
        check_file(path)
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(name, str) for name in tensors):
            raise ModelError(f"{path} holds tensors without names. {AGAIN}")
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    except ModelError:
        raise
    except Exception as error:  # both readers raise many kinds, and every one means a damaged file
        raise ModelError(f"{path} is damaged or incomplete ({error}); download or save it again.") from error


def copy_others(source: Path, folder: Path, has_tokenizer: bool) -> None:
    """What a checkpoint has beside its weights, with or without its tokenizer. ModelError where it cannot be copied."""
    with _writing(folder):
        for path in (source / name for name in (*OTHER_FILES, *TOKENIZER_FILES * has_tokenizer)):
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)


def write_tokenizer(words: str, family: str, folder: Path) -> None:
    """A tokenizer as `tokenizers` writes it, for transformers too. ModelError where it cannot be written."""
    with _writing(folder):
        (folder / "tokenizer.json").write_text(words, encoding="utf-8")
        if family in NAMELESS:
            settings = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
            (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")


def write_generation(settings: Mapping[str, Any] | None, folder: Path) -> None:
    """generation_config.json as transformers reads it; None takes away what is there. Errors: ModelError."""
    path = folder / "generation_config.json"
    with _writing(folder):
        if settings is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A checkpoint as transformers reads it: config.json and model.safetensors. Errors: ModelError.

    Weights that lie there stay until the new ones are written; then shards of theirs go, which would be read first.
    Several processes may write the same checkpoint at a time, such as the ranks of a training.
    """
    from safetensors.torch import save_file

    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with _own_part(folder) as own:
            unfinished = own / SAFE
            save_file(on_host, unfinished, metadata={"format": "pt"})
            for path in (folder / INDEX.format(SAFE), *folder.glob("model-?????-of-?????.safetensors")):
                path.unlink(missing_ok=True)
            unfinished.replace(folder / SAFE)
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _own_part(folder: Path) -> Iterator[Path]:
    """A folder inside for what is not whole yet; it goes in the end, and those that killed writers left go before.

    Whoever writes holds the lock on a part, which ends with the process. The name has the machine's, and a mark that no
    machine's has, since a file system of several may not show one the locks of others; and a part is made under the
    lock on the whole folder, lest another takes it for left before it is locked.
    """
    prefix = f"{SAFE}.part-{node()}+"
    with ExitStack() as stack:
        with _locked(folder, lambda: None) as can_lock:
            for left in folder.glob(f"{glob.escape(prefix)}*") if can_lock else ():
                with suppress(OSError), _locked(left) as is_left:
                    if is_left:
                        shutil.rmtree(left)
            own = Path(stack.enter_context(TemporaryDirectory(prefix=prefix, dir=folder)))
            stack.enter_context(_locked(own))
        yield own


@contextmanager
def _locked(folder: Path, wait: Callable[[], object] | None = None) -> Iterator[bool]:
    """Hold the lock on a folder; False where another holds it, unless `wait` waits, and on file systems without."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            lock(opened, wait)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(opened)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a full disk, a file in the way: safetensors has errors of its own
        raise ModelError(
            f"The model cannot be saved in {folder} ({type(error).__name__}: {first_line(error)}). Choose another "
            "folder, or make room there."
        ) from error
