"""load_target: functions and classes from files, packages and notebooks, and errors."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import linecache
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import is_spacy_available

import compat
from compat import AdaptError, GPT2Config
from compat.user_models import construct, load_forward, load_target, resized, time_limit
from compat.user_models.missing import is_missing
from tests.user_models.own_file import build, loaded

GPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
"""
TRAIN = """
model = GPT()
open("no such file").read()
for step in range(100):
    model(step).backward()
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def notebook(tmp_path: Path, *sources: str) -> Path:
    """Write a notebook with these code cells and text before each of them."""
    prose = {"cell_type": "markdown", "source": ["class GPT is *defined* below"]}
    code = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in sources]
    cells = [cell for one in code for cell in (prose, one)]
    return write(tmp_path / "own book.ipynb", json.dumps({"cells": cells, "nbformat": 4}))


def selected(tmp_path: Path, source: str) -> str:
    """Return the name of the class or function that is selected in a file."""
    return str(loaded(tmp_path, source, None).__name__)


def check_refused(target: str, *fragments: str) -> None:
    with pytest.raises(AdaptError) as caught:
        load_target(target)
    for fragment in fragments:
        assert fragment in str(caught.value)


# Files


def test_a_file_can_be_loaded_by_its_path(tmp_path: Path) -> None:
    text = (
        GPT + "@__import__('dataclasses').dataclass\nclass Config:\n    n: int = 1\nname = __name__"
    )
    path = write(tmp_path / "4th try.py", text)
    before = list(sys.path)
    module = sys.modules[(cls := load_target(f"{path}:GPT")).__module__]
    assert (cls.__name__, module.__file__, sys.path) == ("GPT", str(path), before)
    assert inspect.getsource(cls).startswith("class GPT(nn.Module)")
    config = vars(module)["Config"](n=3)
    assert pickle.loads(pickle.dumps(config)) == config and dataclasses.is_dataclass(config)
    assert type(pickle.loads(pickle.dumps(cls()))) is cls
    again = load_target(f"{path}:GPT")
    assert again is not cls and again.__module__ != cls.__module__ != "__main__"
    assert not (tmp_path / "__pycache__").exists()


def test_an_edited_file_and_its_siblings_are_read_again(tmp_path: Path) -> None:
    for folder, word in [("a", "one"), ("b", "two"), ("b", "three")]:
        sibling = write(
            tmp_path / folder / "same_name_sibling.py", f"WORD = {word!r}\n" * len(word)
        )
        text = f"from same_name_sibling import WORD\n{GPT}    word = WORD, {word!r}\n"
        assert (
            vars(load_target(f"{write(sibling.with_name('gpt.py'), text)}:GPT"))["word"]
            == (word,) * 2
        )


def test_bytes_of_a_comment_in_another_encoding_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "gpt.py"
    file.write_bytes(GPT.encode() + b"# \xc0\xc7\n")
    model = load_target(f"{file}:GPT")
    assert isinstance(model, type) and "self.block = Block()" in inspect.getsource(model)


def test_bytes_of_a_string_in_another_encoding_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "gpt.py"
    file.write_bytes(GPT.encode() + b"name = '\xc0\xc7'\n")
    with pytest.raises(AdaptError, match="cannot be imported: SyntaxError"):
        load_target(f"{file}:GPT")


@pytest.mark.parametrize("sizes", [(3, 4), (5, 6)])
def test_relative_imports_within_a_package_are_resolved(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    write(tmp_path / "pack_a" / "parts.py", f"SIZE = {sizes[0]}")
    write(tmp_path / "pack_a" / "deep" / "near.py", f"SIZE = {sizes[1]}")
    text = "from ..parts import SIZE as A\nfrom .near import SIZE as B\n" + GPT + "    sizes = A, B"
    cls = load_target(f"{write(tmp_path / 'pack_a' / 'deep' / 'gpt.py', text)}:GPT")
    assert vars(cls)["sizes"] == sizes


# Projects by what is true of them: the text of each file, of which the last one has the target.
PROJECTS = {
    "the package root is above all init files": {
        "pack_d/__init__.py": "",
        "pack_d/inner/__init__.py": "",
        "pack_d/parts.py": "SIZE = 5",
        "pack_d/inner/near.py": "from pack_d.parts import SIZE",
        "pack_d/inner/gpt.py": "import pack_d.parts\nfrom .. import parts\n"
        f"from .near import SIZE\n{GPT}    size = SIZE if SIZE == parts.SIZE else 0",
    },
    "a module does not hide the package that contains it": {
        "own_net/own_net.py": "",
        "own_net/parts.py": "SIZE = 5",
        "own_net/gpt.py": f"from own_net.parts import SIZE\n{GPT}    size = SIZE",
    },
    "the folder of a package was renamed": {
        "downloaded/parts.py": "from own_course.sizes import SIZE",
        "downloaded/sizes.py": "SIZE = 5",
        "downloaded/gpt.py": f"from own_course.parts import SIZE\n{GPT}    size = SIZE",
    },
    "modules beside a file are found if their package cannot be imported": {
        "own_models/__init__.py": "from .gpt.sizes import SIZE\nfrom .gpt.model import GPT\n"
        "from .other.model import Other\n",
        "own_models/other/__init__.py": "from .model import Other\n",
        "own_models/other/model.py": "from json import no_such_name as Other\n",
        "own_models/gpt/__init__.py": "",
        "own_models/gpt/sizes.py": "SIZE = 5\n",
        "own_models/gpt/model.py": "import no_such_log\n"
        f"from .sizes import SIZE\n{GPT}    size = SIZE",
    },
    "two files import each other": {
        "own_part.py": "from own_gpt import SIZE\nPART = SIZE",
        "own_gpt.py": f"SIZE = 5\nfrom own_part import PART\n{GPT}    size = PART",
    },
    # The package executes its module a second time, after the library was found to be missing.
    "a module that needs a missing library is imported": {
        "own/tools/tools.py": "import no_such_logger\nlog = no_such_logger.make()\n\n"
        "def width():\n    return 5\n",
        "own/tools/__init__.py": "from . import tools as _tools\nwidth = _tools.width\n"
        "log = _tools.log\n",
        "own/__init__.py": "",
        "own/gpt.py": f"from .tools import width\n{GPT}    size = width()",
    },
}


@pytest.mark.parametrize("case", PROJECTS)
def test_modules_of_the_project_are_imported(tmp_path: Path, case: str) -> None:
    for name, text in PROJECTS[case].items():
        path = write(tmp_path / name, text)
    assert vars(load_target(f"{path}:GPT"))["size"] == 5


@pytest.mark.parametrize("place", ["", "src"])
def test_imports_from_the_top_of_the_project_are_resolved(tmp_path: Path, place: str) -> None:
    """`from own_model.parts import …` works without `__init__.py`, as in a script at the top."""
    top = tmp_path / "project"
    write(top / "pyproject.toml", "")
    write(top / place / "own_settings.py", "SIZE = 5")
    write(top / place / "own_model" / "parts.py", "from own_settings import SIZE\n")
    write(top / "own_data" / "text.txt", "no code")
    text = f"from own_model.parts import SIZE\n{GPT}    size = SIZE"
    path = write(top / place / "own_model" / "deep" / "gpt.py", text)
    before = list(sys.meta_path)
    assert vars(load_target(f"{path}:GPT"))["size"] == 5
    assert sys.meta_path == before
    other = write(path.with_name("other.py"), f"import own_data\n{GPT}    data = own_data.load()")
    check_refused(
        f"{other}:GPT", "No module named 'own_data'", "pip install own_data", "your project"
    )


@pytest.mark.parametrize(
    "added",
    ["sys.path.append('../part_1')", "sys.path += [os.path.abspath('../part_1')]", ""],
    ids=["relative", "absolute", "none"],
)
@pytest.mark.parametrize("lazily", [False, True], ids=["script", "notebook"])
def test_a_path_relative_to_the_files_folder_is_resolved(
    tmp_path: Path, added: str, lazily: bool
) -> None:
    """The working directory is not the file's folder."""
    write(tmp_path / "setup.py", "")
    write(tmp_path / "part_1/own_part.py", GPT.replace("GPT", "Base"))
    source = f"import os, sys\n{added}\nfrom own_part import Base\n\nclass GPT(Base):\n    pass\n"
    path = write(tmp_path / "part_2/own_gpt.py", source)
    if lazily:
        path = notebook(
            tmp_path / "part_2", *source.splitlines()[:3], "class GPT(Base):\n    pass\n"
        )
    if added:
        assert load_target(f"{path}:GPT").__mro__[1].__name__ == "Base"  # type: ignore[attr-defined]
    else:
        check_refused(f"{path}:GPT", "own_part")


@pytest.mark.parametrize(
    "name", ["GPTSimilarity", "GPTForSentiment", "GPTPooledEncoder", "GPTWithMore"]
)
def test_a_model_for_another_task_is_not_selected(tmp_path: Path, name: str) -> None:
    task = f"\nclass {name}(nn.Module):\n    def __init__(self):\n        self.gpt = GPT()\n"
    chosen = load_target(str(write(tmp_path / "own_task.py", GPT + task)))
    assert chosen.__name__ == (name if name == "GPTWithMore" else "GPT")


def test_a_library_with_a_module_named_like_an_own_file_is_not_a_renamed_package(
    tmp_path: Path,
) -> None:
    write(tmp_path / "parts.py", "SIZE = 5")
    text = (
        f"from no_such_library import A\nfrom no_such_library.parts import act\n{GPT}    act = act"
    )
    path = write(tmp_path / "gpt.py", text)
    assert is_missing(vars(load_target(f"{path}:GPT"))["act"])


def test_a_file_is_not_a_module_that_it_imports(tmp_path: Path) -> None:
    write(tmp_path / "parts.py", "from no_such_library.parts import Node")
    path = write(
        tmp_path / "gpt.py", f"from no_such_library.parts import Node\n{GPT}    node = Node"
    )
    assert is_missing(vars(load_target(f"{path}:GPT"))["node"])


def test_modules_that_hold_a_package_whose_import_failed_are_imported_again(tmp_path: Path) -> None:
    package = tmp_path / "own_parts"
    package.mkdir()
    write(package / "__init__.py", "from . import block\nfrom . import late\n")
    write(package / "block.py", "import own_parts\n\ndef size():\n    return own_parts.late.SIZE\n")
    write(package / "late.py", "import no_such_library\nSIZE = 5\n")
    path = write(tmp_path / "gpt.py", f"from own_parts.block import size\n{GPT}    get = size")
    assert vars(load_target(f"{path}:GPT"))["get"]() == 5


def test_a_class_that_trains_a_model_that_it_is_passed_is_not_selected(tmp_path: Path) -> None:
    trainer = """

class Trainer(nn.Module):
    def __init__(self, args, model: GPT = None):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)

    def training_step(self, batch):
        return self(batch)
"""
    assert selected(tmp_path, GPT + trainer) == "GPT"
    adapters = trainer.replace("forward", "apply_to").replace("training_step", "reset")
    assert selected(tmp_path, GPT + adapters) == "GPT"


@pytest.mark.parametrize(
    ("more", "name"), [("", "GPT"), ("; self.head = nn.Linear(24, 97)", "ForLogits")]
)
def test_a_class_that_only_calls_a_model_is_not_selected(
    tmp_path: Path, more: str, name: str
) -> None:
    wrapper = f"""

class ForLogits(nn.Module):
    def __init__(self, gpt_model: GPT):
        super().__init__()
        self.gpt = gpt_model{more}

    def forward(self, ids):
        return self.gpt(ids, targets=None)[0]
"""
    assert selected(tmp_path, GPT + wrapper) == name


def test_calls_of_a_missing_library_in_another_file_are_ignored_while_it_is_loaded(
    tmp_path: Path,
) -> None:
    write(tmp_path / "own_log.py", "import no_such_log\nlog = no_such_log.get(1).named('x')\n")
    path = write(tmp_path / "gpt.py", f"from own_log import log\n{GPT}    log = log")
    found = load_target(f"{path}:GPT")
    vars(found)["log"].info("text")  # the result is not used
    with pytest.raises(ModuleNotFoundError, match="no_such_log"):
        print(vars(found)["log"].info("text"))
    with pytest.raises(ModuleNotFoundError, match="no_such_log"):
        bool(vars(found)["log"])


def test_the_most_complete_model_of_a_lesson_is_selected(tmp_path: Path) -> None:
    first = "class First(nn.Module):\n    def __init__(self):\n        self.vocab = attention = 2\n"
    second = first.replace("First", "Second").replace("2", "2; self.norm = self.blocks = 3")
    other = second.replace("Second", "Finetuned")
    assert selected(tmp_path, f"from torch import nn\n{second}{first}{other}") == "Second"


def test_a_class_that_trains_the_model_is_not_selected(tmp_path: Path) -> None:
    trainer = """
class Training(nn.Module):
    def __init__(self, warmup, vocab_size):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        return self.model(batch).mean()
"""
    assert selected(tmp_path, GPT + trainer) == "GPT"
    forward = "    def forward(self, ids):\n        return self.model(ids)\n"
    assert selected(tmp_path, GPT + trainer + forward) == "Training"


def test_missing_compiled_code_of_a_package_is_ignored_unless_needed(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    write(package / "__init__.py", "from . import kernels\n")
    path = write(package / "model.py", "from . import kernels\n" + GPT)
    assert load_target(str(path)).__name__ == "GPT"
    path.write_text("from . import kernels\n" + GPT.replace("= Block()", "= kernels.Block()"))
    with pytest.raises(AdaptError, match=r"No module named 'own\.kernels'"):
        construct(load_target(str(path)), GPT2Config())


def test_a_project_that_is_not_installed_has_a_version(tmp_path: Path) -> None:
    package = tmp_path / "own_project"
    inner = package / "inner"
    inner.mkdir(parents=True)
    version = 'import importlib.metadata\nversion = importlib.metadata.version("own_project")\n'
    write(package / "__init__.py", version)
    write(inner / "__init__.py", version)
    path = write(inner / "model.py", f"{GPT}\n\nfrom .. import version as own\nassert own == '0'\n")
    assert load_target(str(path)).__name__ == "GPT"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("own_project")


def test_a_function_may_return_a_sequence_of_modules(tmp_path: Path) -> None:
    source = """
from torch import nn

class Block(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(x).softmax(-1)

def make(vocab_size, n_embd):
    return nn.Sequential(nn.Embedding(vocab_size, n_embd), Block(n_embd))
"""
    assert selected(tmp_path, source) == "make"
    attention = "class Block(nn.Module):\n    embedding = lambda: Embedding()\n"
    assert selected(tmp_path, source.replace("class Block(nn.Module):\n", attention)) == "make"
    whole = GPT.replace(
        "self.block = Block()", "self.block, self.wte = Block(), nn.Embedding(8, 8)"
    )
    forward = "    def forward(self, ids):\n        return self.wte(ids).softmax(-1)\n"
    assert selected(tmp_path, source + whole[whole.index("class GPT") :] + forward) == "GPT"


@pytest.mark.parametrize("arguments", ["vocab_size, n_embd", "*, vocab_size, n_embd"])
def test_a_function_with_sizes_builds_a_class_that_takes_its_parts(
    tmp_path: Path, arguments: str
) -> None:
    source = f"""
from torch import nn

class GPT(nn.Module):
    def __init__(self, embedding: nn.Embedding, head: nn.Linear):
        super().__init__()
        self.embedding, self.head = embedding, head

    def forward(self, ids):
        return self.head(self.embedding(ids)).softmax(-1)

def make({arguments}):
    return GPT(nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size))
"""
    path = write(tmp_path / "parts.py", source)
    assert load_target(f"{path}:GPT").__name__ == "make"


@pytest.mark.parametrize("encoder", ["EncoderOnly", "BidirectionalLM"])
def test_an_encoder_is_not_selected_instead_of_the_decoder(tmp_path: Path, encoder: str) -> None:
    """This is true although it has more parts of a language model, as in a comparison of both."""
    source = (
        f"from torch import nn\n\nclass {encoder}(nn.Module):\n"
        "    attention = vocab = norm = head = 2\n\n"
        "class DecoderOnly(nn.Module):\n    attention = vocab = 2\n"
    )
    assert selected(tmp_path, source) == "DecoderOnly"
    assert selected(tmp_path, source.replace(encoder, "Text")) == "Text"


def test_a_recurrent_model_is_not_selected_instead_of_the_transformer(tmp_path: Path) -> None:
    """This is true although it is the last class and a function builds both."""
    source = (
        "from torch import nn\n\nclass Text(nn.Module):\n    attention = vocab = 2\n\n"
        "class Recurrent(nn.Module):\n    attention = vocab = norm = head = 2\n"
        "    def __init__(self):\n        self.rnn = nn.LSTM(2, 2)\n\n"
        "def load():\n    one = Text()\n    two = Recurrent()\n    return one, two\n"
    )
    assert selected(tmp_path, source) == "Text"
    assert selected(tmp_path, source.replace("nn.LSTM", "nn.Linear")) == "Recurrent"


def test_a_notebook_may_write_its_modules(tmp_path: Path) -> None:
    written = f"%%writefile parts/model.py\n{GPT}"
    use = "from parts.model import GPT\nmodel = GPT()\n"
    assert load_target(f"{notebook(tmp_path, written, use)}:GPT").__name__ == "GPT"
    check_refused(f"{notebook(tmp_path, written.replace('.py', '.txt'), use)}:GPT", "parts")


def test_a_class_of_a_notebook_is_that_of_its_last_call(tmp_path: Path) -> None:
    """The cells below define it again for another purpose, and never call it."""
    cells = [GPT, "model = GPT()", f"# again\n{GPT}"]
    cls = load_target(f"{notebook(tmp_path, *cells)}:GPT")
    assert cls.__init__.__code__.co_filename.endswith("#cell-1")
    cls = load_target(f"{notebook(tmp_path, *cells, 'GPT()')}:GPT")
    assert cls.__init__.__code__.co_filename.endswith("#cell-3")


@pytest.mark.parametrize("quote", ["'", '"'])
def test_an_f_string_may_contain_its_own_quotes(tmp_path: Path, quote: str) -> None:
    """Python 3.12 accepts this; the lines and columns of the other code must not change."""
    line = "print(f'{len(losses['a'])} and {{x}}', f'{losses['b']:.2f}')\n".replace("'", quote)
    text = f"losses = {{'a': '', 'b': 1.0}}\n{line}{GPT}"
    cls = load_target(f"{write(tmp_path / 'gpt.py', text)}:GPT")
    assert inspect.getsource(cls).startswith("class GPT(nn.Module)")
    cell = notebook(tmp_path, text)
    assert load_target(f"{cell}:GPT").__name__ == "GPT"
    check_refused(
        f"{write(tmp_path / 'broken.py', text.replace('len(', 'len(('))}:GPT", "SyntaxError"
    )


def test_an_f_string_of_an_imported_module_may_contain_its_own_quotes(tmp_path: Path) -> None:
    line = "print(f'{len(losses['a'])}')\n"
    other = write(tmp_path / "logs.py", f"losses = {{'a': ''}}\n{line}WIDTH = 4\n")
    path = write(tmp_path / "gpt.py", f"from logs import WIDTH\n{GPT}    width = WIDTH\n")
    assert getattr(load_target(f"{path}:GPT"), "width") == 4  # noqa: B009
    other.write_text(other.read_text().replace("len(", "len(("))
    check_refused(f"{path}:GPT", "SyntaxError", "logs.py")


def test_files_above_the_project_are_not_imported(tmp_path: Path) -> None:
    write(tmp_path / "stranger.py", "SIZE = 5")
    write(tmp_path / "project" / "pyproject.toml", "")
    path = write(
        tmp_path / "project" / "gpt.py", f"import stranger\n{GPT}    size = 2 * stranger.SIZE"
    )
    check_refused(f"{path}:GPT", "No module named 'stranger'")


def test_a_library_that_the_model_does_not_need_may_be_missing(tmp_path: Path) -> None:
    text = f"import no_such_logger\n{GPT}\n\ndef train():\n    no_such_logger.init()\n"
    path = write(tmp_path / "gpt.py", text)
    assert load_target(f"{path}:GPT").__name__ == "GPT"
    assert not any(name.startswith("no_such") for name in sys.modules)
    path.write_text(f"{text}\n\nclass Logged(GPT):\n    log = no_such_logger.log()\n")
    check_refused(f"{path}:Logged", "pip install no_such_logger", "log = no_such_logger.log()")
    path.write_text(f"{text}\n\nclass Logged(no_such_logger.Module):\n    pass\n")
    check_refused(
        f"{path}:Logged", "pip install no_such_logger", "class Logged(no_such_logger.Module)"
    )


def test_a_folder_that_a_missing_library_writes_to_is_not_imported_for_it(tmp_path: Path) -> None:
    write(tmp_path / "no_such_logger" / "run" / "debug.log", "")
    path = write(tmp_path / "gpt.py", f"import no_such_logger\n\nno_such_logger.init()\n{GPT}\n")
    assert load_target(f"{path}:GPT").__name__ == "GPT"
    assert "no_such_logger" not in sys.modules


def test_classes_of_a_missing_library_may_be_derived_from(tmp_path: Path) -> None:
    derived = "import no_such_hub\n\nclass Data(no_such_hub.DataModule):\n    size = 1\n\n"
    shared = GPT.replace("(nn.Module)", '(nn.Module, no_such_hub.Mixin, library="mine")')
    assert shared != GPT
    path = write(tmp_path / "gpt.py", derived + shared)
    model = load_target(f"{path}:GPT")()
    assert isinstance(model, nn.Module)
    with pytest.raises(ModuleNotFoundError, match="no_such_hub"):
        sys.modules[type(model).__module__].Data()


def test_a_name_that_the_installed_version_of_a_library_lacks_may_be_imported(
    tmp_path: Path,
) -> None:
    imports = "from torch.nn.functional import is_new_available, newer\n"
    path = write(tmp_path / "gpt.py", f"{imports}assert not is_new_available()\n{GPT}")
    assert load_target(f"{path}:GPT").__name__ == "GPT"
    assert not hasattr(nn.functional, "newer")
    path.write_text(f"{imports}{GPT}\n\nclass Derived(GPT):\n    scale = 2 * newer()\n")
    check_refused(f"{path}:Derived", "newer", "scale = 2 * newer()")


def test_an_attribute_that_forward_does_not_use_may_need_a_missing_library(tmp_path: Path) -> None:
    """Calls such as `self.loss = FusedLoss()` in a constructor are not needed for the logits."""
    text = f"from no_such_kernels import Norm, loss\n{GPT}\n\n"
    text += "class Fused(GPT):\n    def __init__(self):\n        super().__init__()\n"
    path = write(tmp_path / "gpt.py", f"{text}        self.loss = loss.Fused(2)\n")
    fused = load_target(f"{path}:Fused")()
    with pytest.raises(ModuleNotFoundError, match="no_such_kernels"):
        print(fused.loss(torch.ones(2)))
    for used in ("self.norms = nn.Sequential(Norm(2))", "(lambda: loss.Fused(2))()"):
        path.write_text(f"{text}        {used}\n")
        with pytest.raises(ModuleNotFoundError, match="no_such_kernels"):
            load_target(f"{path}:Fused")()


def test_a_tokenizer_of_a_missing_library_has_the_size_of_the_checkpoint(tmp_path: Path) -> None:
    text = """
import no_such_pieces as pieces
from torch import nn
class GPT(nn.Module):
    def __init__(self, file_name, width):
        super().__init__()
        self.tokenizer = pieces.SentencePieceProcessor(file_name)
        self.wte = nn.Embedding(self.tokenizer.vocab_size(), width)
        self.loss = nn.CrossEntropyLoss(ignore_index=self.tokenizer.pad_id())
    def forward(self, ids):
        return self.wte(ids) @ self.wte.weight.T
"""
    target = load_target(f"{write(tmp_path / 'gpt.py', text)}:GPT")
    with pytest.raises(ModuleNotFoundError, match="no_such_pieces"):
        target("tokens.model", 8)
    with resized(target, GPT2Config(vocab_size=31)):
        assert target("tokens.model", 8).wte.num_embeddings == 31


def test_transformers_does_not_count_on_a_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the answer for the process, and the reference would fail to import the library."""
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.delitem(sys.modules, "asking_library", raising=False)
    is_spacy_available.cache_clear()
    asks = "import spacy\nfrom transformers.utils.import_utils import is_spacy_available\n"
    write(tmp_path / "site-packages" / "asking_library.py", f"{asks}FOUND = is_spacy_available()\n")
    path = write(tmp_path / "gpt.py", f"from asking_library import FOUND\n{GPT}    found = FOUND")
    assert vars(load_target(f"{path}:GPT"))["found"] is True
    assert not is_spacy_available()


def test_a_package_with_a_missing_module_stays_imported(tmp_path: Path) -> None:
    """The package's `__init__.py` imports `tokens`, which is not part of the project's copy."""
    package = tmp_path / "lacking"
    write(package / "sizes.py", "SIZE = 5")
    write(package / "__init__.py", "from .gpt import GPT\nfrom .tokens import Tokens\n")
    path = write(package / "gpt.py", f"from .sizes import SIZE\n{GPT}    size = SIZE")
    target = load_target(f"{path}")
    assert target.__name__ == "GPT" and vars(target)["size"] == 5
    assert target.__module__ in sys.modules and "lacking.tokens" not in sys.modules


def test_a_class_of_transformers_is_a_module_before_it_is_executed(tmp_path: Path) -> None:
    text = "from transformers import PreTrainedModel\n" + GPT
    text = text.replace("class GPT(nn.Module)", "class GPT(PreTrainedModel)")
    assert "(PreTrainedModel)" in text
    path = write(tmp_path / "gpt.py", f"{text}\n\nopen('no such file')\n")
    assert load_target(f"{path}").__name__ == "GPT"


def test_a_module_of_a_library_that_needs_a_missing_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, `torch.utils.tensorboard` raises its own ImportError without its library."""
    library = tmp_path / "site-packages"
    needs = "import no_such_logger\nif no_such_logger.__version__ < '2':\n    raise ImportError\n"
    write(library / "own_lib" / "log.py", f"{needs}class Writer:\n    pass\n")
    write(library / "own_lib" / "__init__.py", "SIZE = 5")
    monkeypatch.syspath_prepend(library)
    text = f"import own_lib\nfrom own_lib.log import Writer\n{GPT}    size = own_lib.SIZE"
    path = write(tmp_path / "gpt.py", text)
    assert vars(load_target(f"{path}:GPT"))["size"] == 5
    assert not any(name.startswith(("own_lib.log", "no_such")) for name in sys.modules)
    path.write_text(f"{text}\n\nclass Logged(GPT):\n    log = Writer()()\n")
    check_refused(f"{path}:Logged", "own_lib")
    del sys.modules["own_lib"]


def test_a_notebook_without_imports_has_the_usual_ones(tmp_path: Path) -> None:
    """Another notebook imports these and runs it."""
    cell = "class GPT(nn.Module):\n    size, root = torch.tensor(5), math.sqrt(4)\n"
    found = vars(load_target(f"{notebook(tmp_path, cell)}:GPT"))
    assert (int(found["size"]), found["root"]) == (5, 2)
    check_refused(f"{notebook(tmp_path, cell.replace('math', 'maths'))}:GPT", "'maths' is not")


@pytest.mark.parametrize(
    "setting", ["globals().update(sizes)", "for k, v in sizes.items():\n    locals()[k] = v"]
)
def test_a_notebook_may_assign_variables_by_name(tmp_path: Path, setting: str) -> None:
    cells = ["sizes = {'width': 7}", setting, "class GPT(nn.Module):\n    size = width\n"]
    assert vars(load_target(f"{notebook(tmp_path, *cells)}:GPT"))["size"] == 7
    check_refused(f"{notebook(tmp_path, cells[0], cells[2])}:GPT", "'width' is not")


def test_a_class_that_takes_a_number_of_classes_is_not_the_language_model(tmp_path: Path) -> None:
    other = "class Other(nn.Module):\n    def __init__(self, vocab_size, n_embd, num_classes):\n"
    other += "        self.attention, self.vocab = 1, 2\n"
    text = GPT.replace("class GPT(nn.Module):", "class Model(nn.Module):")
    assert selected(tmp_path, f"{text}\n    vocab_attention = 1\n\n{other}") == "Model"


def test_a_package_of_the_project_with_the_name_compat_is_not_imported(tmp_path: Path) -> None:
    """Its modules count as missing, and the modules of this tool stay imported."""
    write(tmp_path / "compat" / "__init__.py", "")
    write(tmp_path / "compat" / "sizes.py", "width = 7\n")
    before = sys.modules["compat.user_models"]
    path = write(tmp_path / "gpt.py", f"from compat.sizes import width\n{GPT}")
    assert load_target(f"{path}:GPT").__name__ == "GPT"
    assert sys.modules["compat.user_models"] is before
    write(path, f"from compat import width\n{GPT}    size = 2 * width\n")
    check_refused(f"{path}:GPT", "'width'", "`compat` is this tool's own package", "rename yours")
    python = [sys.executable, str(Path(compat.__file__).parent / "__main__.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(python, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert f"Python imports {tmp_path / 'compat' / '__init__.py'} as `compat`" in run.stderr


def test_modules_of_the_project_may_have_the_names_of_libraries(tmp_path: Path) -> None:
    """The project's code imports its own modules, and transformers, imported later, the libraries.

    The check runs twice, because the first import of some libraries cannot be repeated.
    """
    for name in ("tokenizers", "yaml"):
        write(tmp_path / f"{name}.py", "OWN = 1\n")
    path = write(tmp_path / "gpt.py", f"from tokenizers import OWN\nfrom yaml import OWN\n{GPT}")
    code = (
        "import sys\nfrom compat.user_code import library_modules\n"
        "from compat.user_models import load_target\n"
        "for _ in range(2):\n"
        f"    load_target({f'{path}:GPT'!r})\n"
        "    with library_modules():\n        import tokenizers\n"
        "    print(hasattr(tokenizers, 'Tokenizer'), sys.modules['tokenizers'].OWN)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    python, folder = [sys.executable, "-c", code], str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": folder}
    run = subprocess.run(
        python, env=environment, cwd=tmp_path / "elsewhere", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.stdout.splitlines() == ["True 1", "True 1"], run.stderr


def test_a_module_of_the_project_with_missing_data_is_imported(tmp_path: Path) -> None:
    """`vocab_size = len(chars)` is the checkpoint's; a class that needs the data is refused."""
    read = "text = open('no such file').read()\nchars = set(text)\nvocab_size = len(chars)\n"
    write(tmp_path / "own_data.py", f"{read}width = 7\n")
    text = f"from own_data import vocab_size, width\n{GPT}    size = width\n"
    path = write(tmp_path / "gpt.py", text)
    assert vars(load_target(f"{path}:GPT"))["size"] == 7
    path.write_text(text.replace("vocab_size, width", "width, chars"))
    assert vars(load_target(f"{path}:GPT"))["size"] == 7
    path.write_text(text.replace("vocab_size, width", "width, chars") + "    all = sorted(chars)\n")
    check_refused(f"{path}:GPT", "own_data.py", "no such file")


def test_the_call_of_a_model_may_be_an_expression_or_a_function(tmp_path: Path) -> None:
    def model(ids: torch.Tensor) -> tuple[torch.Tensor, str]:
        return ids * 2, "more"

    ids = torch.tensor([[1, 2]])
    assert load_forward("model(ids)[0] + 1")(model, ids).tolist() == [[3, 5]]
    assert load_forward("lambda model, x: model(x)[0]")(model, ids).tolist() == [[2, 4]]
    with pytest.raises(AdaptError, match="has the type tuple, but a tensor of logits"):
        load_forward("model(ids)")(model, ids)
    path = write(tmp_path / "call.py", "def logits(model, ids):\n    return model(ids)[0]\n")
    assert load_forward(f"{path}:logits")(model, ids).tolist() == [[2, 4]]
    with pytest.raises(AdaptError, match=r'for example "model\(ids\)\[0\]"'):
        load_forward("return model(ids)")


MAKE_MODEL = "def make_model():\n    return GPT()\n"


@pytest.mark.parametrize("kind", ["file", "notebook", "package"])
def test_a_function_that_builds_the_model_is_the_default(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is true even if a file has several classes."""
    text = GPT + "class Other(nn.Module):\n    pass\n" + MAKE_MODEL
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pack_e" / "models.py", text)
    places = {"file": write(tmp_path / "gpt.py", text), "package": "pack_e.models"}
    place = places.get(kind) or notebook(tmp_path, GPT, MAKE_MODEL, BOOM)
    for target in (f"{place}:make_model", str(place)):
        function = load_target(target)
        assert type(construct(function, GPT2Config())).__name__ == "GPT"


def test_a_module_can_be_loaded_by_its_dotted_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "pack_b" / "models.py", GPT)
    monkeypatch.chdir(tmp_path)
    cls = load_target("pack_b.models:GPT")
    assert cls.__module__ == "pack_b.models" and load_target("pack_b.models") is cls
    assert load_target("torch.nn:Linear").__name__ == "Linear"
    check_refused(
        "pack_b.modles:GPT", "no module 'pack_b.modles'", "no 'pack_b.modles'", str(tmp_path)
    )


def test_training_at_module_level_is_not_executed(tmp_path: Path) -> None:
    text = "vocab_size = len(open('no such file').read())\nn_embd = 8\n" + GPT
    path = write(tmp_path / "gpt.py", text + "        self.sizes = vocab_size, n_embd\n" + TRAIN)
    model = construct(load_target(f"{path}:GPT"), GPT2Config(vocab_size=97, n_embd=24))
    assert vars(model)["sizes"] == (97, 24)
    assert inspect.getsource(type(model)).startswith("class GPT(nn.Module)")
    assert "model" not in vars(sys.modules[type(model).__module__])
    write(path, GPT + "import os\nif __name__ == '__main__':" + TRAIN.replace("\n", "\n    "))
    assert "os" in vars(
        sys.modules[load_target(f"{path}:GPT").__module__]
    )  # all of it was imported


def test_training_by_a_trainer_is_not_executed(tmp_path: Path) -> None:
    trainer = "class Trainer:\n    def fit(self, model):\n        model.train()\n"
    path = write(tmp_path / "gpt.py", f"{GPT}{trainer}seen = [1]\nTrainer().fit(GPT())\n")
    module = sys.modules[load_target(f"{path}:GPT").__module__]
    assert "GPT" in vars(module) and "seen" not in vars(module)


# The choice of the function or class


@pytest.mark.parametrize("name", ["own_gpt", "own_data"], ids=["the file", "a file it imports"])
def test_code_that_does_not_end_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.5)
    texts = {
        "own_data": "SIZE = 5\n",
        "own_gpt": f"from own_data import SIZE\n{GPT}    size = SIZE",
    }
    texts[name] += "\nwords = 0\nwhile True:\n    words += 1\n"
    for each, text in texts.items():
        write(tmp_path / f"{each}.py", text)
    handler = signal.getsignal(signal.SIGALRM)
    for _ in range(2):
        assert vars(load_target(f"{tmp_path / 'own_gpt.py'}:GPT"))["size"] == 5
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "installed with --target"])
def test_a_library_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.1)
    monkeypatch.delitem(sys.modules, "slow_library", raising=False)
    monkeypatch.syspath_prepend(tmp_path / folder)
    write(tmp_path / folder / "slow_library.py", "import time\ntime.sleep(0.4)\nSIZE = 5\n")
    if "--target" in folder:
        record = tmp_path / folder / "slow_library-1.0.dist-info" / "RECORD"
        write(record, "slow_library.py,,\nslow_library-1.0.dist-info/RECORD,,\n")
    path = write(tmp_path / "own_gpt.py", f"from slow_library import SIZE\n{GPT}    size = SIZE")
    assert vars(load_target(f"{path}:GPT"))["size"] == 5


def test_a_class_that_needs_a_value_that_takes_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "SECONDS", 0.5)
    source = f"def count():\n    while True: pass\nwords = count()\n{GPT}    words = words + 1"
    path = write(tmp_path / "own_gpt.py", source)
    check_refused(f"{path}:GPT", "it did not end in 0.5 seconds", "while True: pass")


def test_a_model_of_blocks_from_another_file_is_the_default(tmp_path: Path) -> None:
    parts = "from torch import nn\nclass Attention(nn.Module): pass\nclass Block(nn.Module): pass\n"
    write(tmp_path / "own_parts.py", parts)
    source = "from torch import nn\nfrom own_parts import Attention, Block\n"
    for name, made in (("OneAttention", "Attention()"), ("Stacked", "nn.Sequential(Block())")):
        source += f"class {name}(nn.Module):\n    def __init__(self, vocab):\n        x = {made}\n"
    assert selected(tmp_path, source) == "Stacked"


def test_the_default_is_the_class_that_no_other_class_uses(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt.py", GPT + "from torch.nn import Linear\n")
    assert load_target(str(path)).__name__ == "GPT"
    write(path, GPT + "class Other(GPT):\n    pass\nclass More(GPT):\n    pass\n")
    notes: list[str] = []
    assert load_target(str(path), notes).__name__ == "More"
    assert notes == [f"More is the last model in the file, which has others too: {path}:Other"]
    check_refused(str(write(path, "x = 1")), "defines no nn.Module class")
    plain_class = "class Tiny:\n    def forward(self, ids):\n        return ids\n"
    check_refused(
        str(write(path, plain_class)), "Tiny has a method forward", "class Tiny(nn.Module)"
    )
    assert load_target(f"{notebook(tmp_path, GPT)}:").__name__ == "GPT"


@pytest.mark.parametrize("names", ["Block, Imported", "*"])
@pytest.mark.parametrize("training", ["", "for step in range(10): train()\n"])
def test_a_model_that_a_script_imports_is_the_default(
    tmp_path: Path, names: str, training: str
) -> None:
    source = f"{GPT}class Block(nn.Module): pass\n"
    source += "class Imported(nn.Module):\n    def __init__(self, vocab):\n        x = Block()\n"
    write(tmp_path / "own_imported.py", source)
    path = write(tmp_path / "own_train.py", f"from own_imported import {names}\n{training}")
    notes: list[str] = []
    assert load_target(str(path), notes).__name__ == "Imported"
    assert notes == [f"{path} defines no model. Imported, which it imports, was selected"]
    write(tmp_path / "own_imported.py", "from torch import nn\nclass Block(nn.Module): pass\n")
    check_refused(str(write(path, "from own_imported import *")), "defines no nn.Module class")


def test_a_model_that_a_function_of_a_script_imports_is_the_default(tmp_path: Path) -> None:
    source = f"{GPT}class Block(nn.Module): pass\n"
    source += "class Inner(nn.Module):\n    def __init__(self, vocab):\n        x = Block()\n"
    write(tmp_path / "own_inner.py", source)
    path = write(tmp_path / "own_train.py", "def train():\n    from own_inner import Inner\n")
    assert load_target(str(path)).__name__ == "Inner"


PLAIN = """
from torch import nn

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.project = nn.Linear(width, width)

class Base(object):
    def score(self):
        return 0

class LanguageModel(Base):
    def __init__(self, vocab_size, width):
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = [Attention(width)]

    def forward(self, ids):
        return self.table(ids) @ self.table.weight.T

class Trainer:
    def __init__(self, model):
        self.model = model

    def forward(self, ids):
        return self.model.forward(ids)
"""


@pytest.mark.parametrize("training", ["", "for step in range(10): train()\n"])
def test_a_model_that_is_a_plain_class_is_derived_from_module(
    tmp_path: Path, training: str
) -> None:
    path = write(tmp_path / "gpt.py", PLAIN + training)
    notes: list[str] = []
    cls = load_target(str(path), notes)
    assert cls.__name__ == "LanguageModel" and len(notes) == 1
    assert notes[0].startswith("LanguageModel is a plain class, which compat derived from nn.Modul")
    model = cls(11, 4)
    assert isinstance(model, nn.Module) and [*model.state_dict()] == ["table.weight"]
    assert not issubclass(sys.modules[cls.__module__].Trainer, nn.Module)
    assert "class LanguageModel(Base):" in inspect.getsource(cls)


def test_a_model_with_a_base_from_another_file_is_not_a_plain_class(tmp_path: Path) -> None:
    write(tmp_path / "own_base.py", "from torch import nn\nclass Core(nn.Module): pass\n")
    source = PLAIN.replace("class Base(object)", "class Base(Core)").replace(
        "from torch import nn", "from torch import nn\nfrom own_base import Core"
    )
    path = write(tmp_path / "gpt.py", source.replace("width):\n        self.table", """width):
        super().__init__()
        self.table"""))  # fmt: skip
    notes: list[str] = []
    assert load_target(str(path), notes).__name__ == "LanguageModel"
    assert notes == []


@pytest.mark.parametrize("sign", ["Automatically generated by Colab.", "# In[1]:"])
def test_an_indented_line_of_an_exported_notebook_is_executed(tmp_path: Path, sign: str) -> None:
    lines = f'"""\n{sign}\n"""\n' if sign[0] == "A" else f"{sign}\n"
    path = write(tmp_path / "gpt.py", f"{lines}{GPT}\nwidth = 3\n width = 4\n")
    assert vars(sys.modules[load_target(f"{path}:GPT").__module__])["width"] == 4
    write(path, f"{GPT}\nwidth = 3\n width = 4\nclass B(nn.Module): pass\n")
    check_refused(f"{path}:GPT", "IndentationError: unexpected indent")


def test_a_script_after_the_classes_may_be_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt.py", f"{GPT}\nmodel = GPT()\nif model:\nprint(model)\n")
    notes: list[str] = []
    assert load_target(str(path), notes).__name__ == "GPT"
    assert notes == [
        f"{path} is not Python at line 16 (IndentationError: expected an indented block after 'if' "
        "statement on line 15), so only the statements before were executed"
    ]
    write(path, f"if True:\nprint(1)\n{GPT}")
    check_refused(f"{path}:GPT", "IndentationError: expected an indented block")


def test_a_head_that_takes_the_model_is_the_default(tmp_path: Path) -> None:
    source = f"""{GPT}
class GPTLMHead(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.head = gpt, nn.Linear(8, 97)

class GPTClsHead(nn.Module):
    def __init__(self, gpt, classes):
        super().__init__()
        self.gpt, self.head = gpt, nn.Linear(8, classes)
"""
    assert selected(tmp_path, source) == "GPTLMHead"


def test_a_config_inside_the_model_is_not_a_use_of_the_model(tmp_path: Path) -> None:
    source = """
from torch import nn

class GPT(nn.Module):
    class Config:
        vocab_size = 97

    def __init__(self, config: Config):
        super().__init__()
        self.embed, self.block = nn.Embedding(config.vocab_size, 8), Block(config)

class Block(nn.Module):
    def __init__(self, config: GPT.Config):
        super().__init__()

    def forward(self, x):
        return x.softmax(-1)
"""
    assert selected(tmp_path, source) == "GPT"


def test_of_two_models_that_a_function_returns_neither_is_a_part(tmp_path: Path) -> None:
    source = f"""{GPT}
class Baseline(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 8)

def build(kind):
    if kind == "gpt":
        return GPT()
    return Baseline()
"""
    assert selected(tmp_path, source) == "GPT"


def test_the_variants_of_a_model_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt.py", f"{GPT}\n{GPT.replace('class GPT', 'class RotaryGPT')}")
    notes: list[str] = []
    assert load_target(str(path), notes).__name__ == "GPT"
    [note] = notes
    assert note == (
        f"GPT was selected of the models in the file, which has variants: {path}:RotaryGPT"
    )


def test_a_function_may_build_the_model_from_parts_of_another_file(tmp_path: Path) -> None:
    write(tmp_path / "parts.py", "from torch import nn\nclass Embed(nn.Embedding):\n    pass\n")
    source = """
from torch import nn
import parts

class Block(nn.Module):
    def forward(self, x):
        return x.softmax(-1)  # attention over the vocabulary

class Model(nn.Module):
    def __init__(self, embed: parts.Embed, block: Block):
        super().__init__()
        self.embed, self.block = embed, block

def build(vocab_size, n_embd):
    block = Block()
    return Model(
        parts.Embed(vocab_size, n_embd), block
    )
"""
    path = write(tmp_path / "factory.py", source)
    assert load_target(str(path)).__name__ == "build"
    assert load_target(f"{path}:Block").__name__ == "Block"


@pytest.mark.parametrize("kind", ["file", "notebook"])
def test_a_name_that_is_not_a_model_is_refused(tmp_path: Path, kind: str) -> None:
    text = GPT + "class Config:\n    pass\nGPTX = 3\nmade = GPT()\n"
    path = write(tmp_path / "gpt.py", text) if kind == "file" else notebook(tmp_path, text)
    check_refused(
        f"{path}:Gpt1",
        "no class or function 'Gpt1'",
        "Did you mean 'GPT'?",
        "classes: Block and GPT",
    )
    check_refused(
        f"{path}:Config",
        "'Config' in ",
        "is a class, but must be a function that returns the model or an nn.Module class. Its ",
    )
    check_refused(
        f"{path}:GPTX",
        "is of type int, but must be a function that returns the model or an nn.Module",
    )
    check_refused(f"{path}:made", "is an instance of a model. Pass its class", ":GPT")


# Targets that cannot be imported


def test_a_target_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "my_gpt.py", GPT)
    check_refused(f"{tmp_path}/my_gtp.py:GPT", "no file ", "Did you mean 'my_gpt.py'?")
    check_refused(f"{tmp_path}/zzz.ipynb:GPT", "no file ", "Check the path")
    check_refused(
        "no/such:GPT",
        "Pass FILE.py:make_model",
        "FILE.py:Class, FILE.ipynb:Class or package.module:Class",
    )
    check_refused(
        "no_such_module:GPT", "no module 'no_such_module'", "with its suffix, FILE.py:make_model"
    )


FAULTS: dict[str, tuple[str, list[str]]] = {
    "raises": ("x = 1\n1 / 0\n", ["ZeroDivisionError: division by zero", "gpt.py:2: 1 / 0"]),
    "below": (
        "import json\ndef f():\n    json.loads('{')\n\nf()",
        ["JSONDecodeError: Expecting", "gpt.py:3: json.loads('{')"],
    ),
    "package": (
        "import no_such_package.part",
        ["No module named 'no_such_package'", "gpt.py:1", "pip install no_such_package"],
    ),
    "renamed": ("raise ModuleNotFoundError('x', name='yaml.y')", ["pip install pyyaml"]),
    "syntax": ("x = 1\nclass GPT(:\n", ["SyntaxError: ", "gpt.py:2: class GPT(:"]),
    "sibling": ("import broken_one", ["SyntaxError: ", "broken_one.py:3: def"]),
    "exit": ("raise SystemExit(2)", ["SystemExit: 2", "gpt.py:1", "under `if __name__ =="]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, case: str) -> None:
    source, fragments = FAULTS[case]
    write(tmp_path / "broken_one.py", "\n\ndef")
    path = write(tmp_path / "gpt.py", source)
    before = list(sys.path), set(sys.modules)
    check_refused(f"{path}:GPT", f"{path} cannot be imported: ", *fragments)
    assert sys.path == before[0] and not {m for m in set(sys.modules) - before[1] if "gpt" in m}


def test_an_imported_module_that_ends_the_program_is_ignored(tmp_path: Path) -> None:
    """For example, a package may require a key from the environment."""
    write(tmp_path / "own" / "__init__.py", "from own.server import KEY\n")
    write(tmp_path / "own" / "server.py", "import sys\n\nKEY = sys.exit(1)\nWIDTH = 8\n")
    model = "class GPT(nn.Embedding):\n    width = WIDTH\n"
    text = f"from torch import nn\nfrom own.server import WIDTH\n\n{model}"
    path = write(tmp_path / "own" / "gpt.py", text)
    assert load_target(str(path)).width == 8  # type: ignore[attr-defined]


def test_a_module_of_a_package_that_is_not_executed_is_its_attribute(tmp_path: Path) -> None:
    """The package's `__init__.py` fails, so that only what is read of it is executed."""
    write(tmp_path / "own_parts" / "__init__.py", "import sys\n\nsys.exit(1)\n")
    write(tmp_path / "own_parts" / "sizes.py", "import own_parts.widths\n\n"
          "def width():\n    return own_parts.widths.WIDTH\n")  # fmt: skip
    write(tmp_path / "own_parts" / "widths.py", "WIDTH = 8\n")
    model = "class GPT(nn.Embedding):\n    width = width()\n"
    path = write(
        tmp_path / "gpt.py", f"from torch import nn\nfrom own_parts.sizes import width\n\n{model}"
    )
    assert load_target(str(path)).width == 8  # type: ignore[attr-defined]


def test_files_that_register_their_classes_are_imported(tmp_path: Path) -> None:
    """The author's training script imports them, and not the file of the model."""
    registry = "MODULES = {}\n\ndef register(name):\n    def add(cls):\n"
    registry += "        MODULES[name] = cls\n        return cls\n    return add\n"
    write(tmp_path / "own_modules" / "__init__.py", registry)
    norm = "import own_modules\n\n@own_modules.register('norm')\nclass Norm:\n    width = 8\n"
    write(tmp_path / "own_modules" / "norms.py", norm)
    write(tmp_path / "own_modules" / "broken.py", f"{norm}raise OSError\n")
    write(tmp_path / "own_modules" / "script.py", "from own_modules import register\nexit(1)\n")
    model = "class GPT(nn.Embedding):\n    def width(self):\n        return MODULES['norm'].width\n"
    text = f"from torch import nn\nfrom own_modules import MODULES\n\n{model}"
    target = load_target(str(write(tmp_path / "gpt.py", text)))
    assert target(2, 3).width() == 8 and "own_modules.script" not in sys.modules


def test_a_module_in_a_folder_of_the_authors_machine_is_found(tmp_path: Path) -> None:
    write(tmp_path / "layers" / "sizes_of_mine.py", "WIDTH = 8\n")
    lines = ["import sys", "sys.path.append('/home/author/layers')", "from torch import nn"]
    lines += ["from sizes_of_mine import WIDTH", "class GPT(nn.Linear):", "    w = WIDTH"]
    path = write(tmp_path / "gpt.py", "\n".join(lines))
    assert load_target(f"{path}:GPT").w == 8  # type: ignore[attr-defined]
    write(tmp_path / "other" / "sizes_of_mine.py", "WIDTH = 9\n")
    sys.modules.pop("sizes_of_mine", None)
    assert load_target(f"{path}:GPT").w not in (8, 9)  # type: ignore[attr-defined]


def test_a_constructor_may_import_modules_beside_its_file(tmp_path: Path) -> None:
    write(tmp_path / "own" / "experts_of_mine.py", "WIDTH = 8\n")
    lines = ["from torch import nn", "class GPT(nn.Module):", "    def __init__(self):"]
    lines += ["        super().__init__()", "        from experts_of_mine import WIDTH"]
    path = write(tmp_path / "own" / "gpt.py", "\n".join([*lines, "        self.width = WIDTH"]))
    before = list(sys.path)
    model = construct(load_target(f"{path}:GPT"), GPT2Config())
    assert model.width == 8 and sys.path == before


@pytest.mark.parametrize("as_package", [False, True])
def test_a_module_in_a_folder_of_its_own_name_is_found(tmp_path: Path, as_package: bool) -> None:
    """The folder is on the path of the author's machine, unless its parts are imported by name."""
    write(tmp_path / "lib_of_mine" / "lib_of_mine.py", "WIDTH = 8\n")
    imports = "from lib_of_mine import WIDTH"
    if as_package:
        imports = "from lib_of_mine import lib_of_mine\nWIDTH = lib_of_mine.WIDTH"
    code = f"{imports}\nfrom torch import nn\n\nclass GPT(nn.Linear):\n    w = WIDTH\n"
    path = write(tmp_path / "model" / "gpt.py", code)
    write(tmp_path / "pyproject.toml", "")
    assert load_target(f"{path}:GPT").w == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["parts.py", "parts/sizes.py"])
def test_a_package_whose_folder_was_renamed_is_found_with_its_parts(
    tmp_path: Path, part: str
) -> None:
    """On the author's machine, the folder of the project is called Mine."""
    write(tmp_path / part, "WIDTH = 8\n")
    write(tmp_path / "pyproject.toml", "")
    module = part.removesuffix(".py").replace("/", ".")
    imports = f"from Mine.{module} import WIDTH\nfrom torch import nn\n"
    path = write(tmp_path / "model" / "gpt.py", f"{imports}class GPT(nn.Linear):\n    w = WIDTH\n")
    assert load_target(f"{path}:GPT").w == 8  # type: ignore[attr-defined]


def test_a_file_may_change_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths relative to the original working directory stay valid."""
    monkeypatch.chdir(tmp_path)
    change = "import os\nos.chdir(os.path.dirname(os.path.abspath(__file__)))\n"
    write(tmp_path / "inner" / "gpt.py", change + GPT)
    for _ in range(2):
        assert load_target("inner/gpt.py:GPT").__name__ == "GPT"
    assert Path.cwd() == tmp_path


def test_a_folder_may_have_the_name_of_a_library(tmp_path: Path) -> None:
    write(tmp_path / "models" / "torch" / "layers.py", "WIDTH = 8\n")
    text = "from torch import nn\nfrom .layers import WIDTH\nclass GPT(nn.Linear): w = WIDTH\n"
    target = load_target(f"{write(tmp_path / 'models' / 'torch' / 'gpt.py', text)}:GPT")
    assert target.w == 8  # type: ignore[attr-defined]
    assert not target.__module__.startswith("torch.")


def test_an_encoder_decoder_is_recognized_by_its_argument_names(tmp_path: Path) -> None:
    both = "class Both(nn.Embedding):\n    def forward(self, padded_src, padded_targets): ...\n"
    text = f"from torch import nn\nclass GPT(nn.Embedding): ...\n{both}"
    assert selected(tmp_path, text) == "GPT"


def test_keyboard_interrupt_is_not_caught(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_target(f"{write(tmp_path / 'gpt.py', 'raise KeyboardInterrupt')}:GPT")


# Notebooks

BOOM = "raise RuntimeError('not to be executed')\n"
IMPORTS = "import torch\nfrom torch import nn\nimport no_such_package\n"


def test_only_the_code_that_the_class_needs_is_executed(tmp_path: Path) -> None:
    cells = [
        "!pip install torch\n%matplotlib inline\nimport torch\nimport no_such_package\ntorch?\n",
        "from dataclasses import dataclass\nimport torch.nn as nn\n" + BOOM,
        "def size():\n    return WIDTH // 2\nWIDTH = 8\ntorch.manual_seed(1 / 0)\n",
        "%%bash\nclass GPT: this is no Python\n",
        "@dataclass\nclass Config:\n    n: int = size()\n" + BOOM + "x = loss = B = 1 / 0\n",
        "%%time\nclass GPT(nn.Module):\n    def __init__(self, config: Config):\n"
        "        super().__init__()\n        B, x = config.n, 1\n"
        "        self.parts = [Part(B + x) for loss in range(x)]\n",
        "class Part(nn.Module):\n    def __init__(self, n):\n        super().__init__()\n"
        "        self.n = n\n",
        "this cell is broken\n",
        TRAIN,
    ]
    cls = load_target(f"{notebook(tmp_path, *cells)}:GPT")
    module = vars(sys.modules[cls.__module__])
    own = "dataclass nn size WIDTH Config GPT Part"
    assert {name for name in module if not name.startswith("__")} == set(own.split())
    assert cls(module["Config"]()).parts[0].n == 5  # type: ignore[attr-defined]


def values(tmp_path: Path, cells: list[str]) -> object:
    """Return the result of GPT().get()."""
    write(tmp_path / "pack_c" / "one.py", "N = 1")
    write(tmp_path / "pack_c" / "two.py", "N = 2")
    body = "class GPT(nn.Module):\n    def get(self):\n        return "
    written = [IMPORTS, *(cell.replace("GPT: ", body) for cell in cells)]
    made = load_target(f"{notebook(tmp_path, *written)}:GPT")()
    return made.get()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a = 1", "a = 2", "GPT: a", "a = 3"], 2),
        (["GPT: a", "a = 3"], 3),
        (["a = 1", "GPT: a", "a = 2\nGPT: -a", "a = 3"], -2),
        (["a = 1", "b = a", "a = 2", "GPT: (a, b)"], (2, 1)),
        (["a = {'x': 1}", "a['y'] = 2; a.update(z=3)", "GPT: a", "a['w'] = 4"],
         {"x": 1, "y": 2, "z": 3}),
        (["a = 1\na += 4", "GPT: a"], 5),
        (["a = 1", "def f():\n    return a", "a = 2", "GPT: f()", "a = 3"], 2),
        (["b = 3", "a = [b for _ in range(2)]", "b = 4", "GPT: a"], [3, 3]),
        (["import pack_c.one", "import pack_c.two", "GPT: pack_c.one.N + pack_c.two.N"], 3),
        (["a, (b, *c) = 1, (2, 3)", "GPT: (a, b, c)"], (1, 2, [3])),
        (["GPT: a", "def a2(self):\n    return 7\n", "GPT.get = a2", BOOM], 7),
        (["to = lambda c: lambda f: setattr(c, 'get', f)", "GPT: 1", "@to(GPT)\ndef g(_): pass"],
         None),
        (["try:\n    import no_such_package\nexcept ImportError:\n    a = 9", "GPT: a"], 9),
        (["if True:\n    %pip install x\n    a = 4", "GPT: a"], 4),
        (["pip install -U x\nconda install y\na = 4", "GPT: a"], 4),
        (["files = !ls\na = (7\n% 4)\n!pip install \\\n  torch", "GPT: a"], 3),
        (["from os.path import *", "GPT: basename('a/b')"], "b"),
        (["import os.path, sys\nimport os.path as p", "import os", "GPT: os.path.basename('/b')"],
         "b"),
        (["a = [b for b in range(2)]\nb = 1 / 0", "GPT: a"], [0, 1]),
        (["from __future__ import annotations", "GPT: f()", "def f(x: No = 1):\n    return x"], 1),
    ],
)  # fmt: skip
def test_the_last_definition_before_the_class_is_preferred(
    tmp_path: Path, cells: list[str], expected: object
) -> None:
    assert values(tmp_path, cells) == expected


def test_line_numbers_are_those_of_the_cell(tmp_path: Path) -> None:
    cells = [
        "from torch import nn",
        "%time\n\nclass GPT(nn.Module):\n    def f(self):\n        1 / 0\n",
    ]
    path = notebook(tmp_path, *cells, "class GPT2(GPT):\n    def g(self):\n        pass")
    cls = load_target(f"{path}:GPT2")
    module = sys.modules[cls.__module__]
    filename = vars(module)["GPT"].f.__code__.co_filename
    assert (module.__file__, filename) == (str(path), f"{path}#cell-2")
    assert linecache.getline(filename, 5) == "        1 / 0\n"
    assert inspect.getsource(vars(module)["GPT"].f) == "    def f(self):\n        1 / 0\n"
    assert inspect.getsource(cls) == "class GPT2(GPT):\n    def g(self):\n        pass\n"
    assert inspect.getsource(vars(module)["GPT"]).endswith("1 / 0\n")
    assert type(pickle.loads(pickle.dumps(cls()))) is cls


def test_a_config_that_the_class_does_not_mention_is_executed(tmp_path: Path) -> None:
    cells = [
        IMPORTS.replace("import no_such_package\n", ""),
        "class GPT(nn.Module):\n    def __init__(self, c):\n        super().__init__()\n"
        "        self.n = c['n']\n",
        "WIDTH = 5",
        "CONFIG = {'n': WIDTH * 2}\n" + BOOM,
    ]
    cls = load_target(f"{notebook(tmp_path, *cells)}:GPT")
    assert vars(construct(cls, GPT2Config(), config_name="CONFIG"))["n"] == 10
    with pytest.raises(AdaptError, match="no config 'CONFIGS'"):
        construct(cls, GPT2Config(), config_name="CONFIGS")


def test_notebooks_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    check_refused(
        f"{(path := write(tmp_path / 'a.ipynb', '{'))}:GPT", f"{path} is not a notebook: not JSON: "
    )
    for text in ("[]", "{}", '{"cells": [{}]}', '{"cells": 3}'):
        check_refused(
            f"{write(path, text)}:GPT", "is not a notebook of format 4 with a list of cells"
        )
    path = notebook(tmp_path, "x = 1", "y = 2\nclass GPT(nn.Module:\n    pass\n")
    check_refused(f"{path}:GPT", "SyntaxError: ", f"{path}#cell-2:2: class GPT(nn.Module:")
    path = notebook(tmp_path, IMPORTS, "class GPT(nn.Module):\n    x = 1 / 0\n")
    check_refused(f"{path}:GPT", "ZeroDivisionError", f"{path}#cell-2:2: x = 1 / 0")
    path = notebook(tmp_path, IMPORTS, "class GPT(no_such_package.Module):\n    pass\n")
    derives = f"{path}#cell-2:1: class GPT(no_such_package.Module):"
    check_refused(f"{path}:GPT", "pip install no_such_package", derives)


def test_a_class_that_embeds_tokens_is_preferred_to_unused_helpers(tmp_path: Path) -> None:
    source = """
from torch import nn

class OldHead(nn.Module):
    pass

class Tokens(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.table = nn.Embedding(vocab_size, n_embd)

class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.tokens = Tokens(vocab_size, n_embd)
"""
    assert selected(tmp_path, source) == "GPT"
    source += "\n\nclass Other(GPT):\n    pass\n\n\nclass Last(GPT):\n    pass\n"
    assert selected(tmp_path, source) == "Last"


@pytest.mark.parametrize(
    "start",
    [
        "def main(n_embd, *, vocab_size=65):\n    block_size = len(open('no such file').read())\n",
        "if __name__ == '__main__':\n    n_embd, vocab_size, block_size = 32, 65, 8\n",
        "n_embd, vocab_size, block_size = 32, 65, 8\nif n_embd:\n    pass\n",
        "n_embd, vocab_size, block_size = 32, 65, 8\ntry:\n    import no\nexcept ImportError:\n",
    ],
    ids=["function", "main guard", "if", "try"],
)
def test_a_model_may_be_defined_in_a_block_of_statements(tmp_path: Path, start: str) -> None:
    """The parameters of a function are sizes like globals; its return statements do not run."""
    own = """
    class GPT(Part):
        def __init__(self):
            super().__init__(n_embd)
            self.wte, self.sizes = nn.Embedding(vocab_size, n_embd), (vocab_size, block_size)
        def attention(self):
            pass
    if n_embd:
        RETURN
    model = GPT()
"""
    part = "from torch import nn\nclass Part(nn.Module):\n    def __init__(self, width):\n"
    part += "        super().__init__()\n        self.width = width\n"
    own = own.replace("RETURN", "return model" if "def main" in start else "pass")
    cls = load_target(str(write(tmp_path / "own.py", part + start + own)))
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=24)
    model = vars(construct(cls, config))
    assert cls.__name__ == "GPT" and model["sizes"] == (97, 32) and model["width"] == 24


def test_a_file_may_parse_arguments_at_module_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser does not see compat's own arguments, whether or not the file also trains."""
    monkeypatch.setattr(sys, "argv", ["gpt2-compat", "adapt", "--json"])
    text = """
import argparse
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=12)
args = parser.parse_args()
class GPT(nn.Module):
    width = args.width
"""
    for ending in ("", "loss = GPT()()\nloss.backward()\n"):
        path = write(tmp_path / f"gpt_{len(ending)}.py", text + ending)
        assert vars(load_target(f"{path}:GPT"))["width"] == 12
        assert sys.argv == ["gpt2-compat", "adapt", "--json"]


def test_a_failing_statement_that_the_class_does_not_need_is_ignored(tmp_path: Path) -> None:
    """For example, it may read the author's data."""
    text = (
        "import torch\nfrom torch import nn\n\ntext = open('input.txt').read()\n\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Linear(2, 2)\n"
    )
    assert selected(tmp_path, text) == "Net"
    with pytest.raises(AdaptError, match=r"input\.txt"):
        build(tmp_path, text.replace("Linear(2, 2)", "Linear(2, int(text))"), None)


def test_values_that_depend_on_missing_data_have_the_checkpoints_sizes(tmp_path: Path) -> None:
    """They may be attributes, entries or lengths, also in code that trains."""
    text = """
import json
from torch import nn

class Tokenizer:
    def __init__(self, text):
        self.chars = sorted(set(text))
        self.n_vocab = len(self.chars)

def train():
    GPT()(None).backward()

text = open("no such file").read()
tokenizer = Tokenizer(text)
params = json.load(open("no such file"))

class GPT(nn.Module):
    def __init__(self, dropout=params["model"]["dropout"]):
        super().__init__()
        self.sizes = tokenizer.n_vocab, params["model"]["dim"], len(tokenizer), dropout

train()
"""
    config = GPT2Config(vocab_size=97, n_embd=24, resid_pdrop=0.25)
    assert build(tmp_path, text, config=config).sizes == (97, 24, 97, 0.25)
    with pytest.raises(AdaptError, match="No such file or directory: 'no such file'"):
        build(tmp_path, text.replace('["dim"]', '["other"] > 7'), config=config)


def test_a_lightning_module_is_a_module_if_lightning_is_missing(tmp_path: Path) -> None:
    source = "import no_such_lightning as pl\n\n\nclass Net(pl.LightningModule):\n    pass\n"
    assert issubclass(loaded(tmp_path, source, None), torch.nn.Module)


def test_hyperparameters_are_stored_if_lightning_is_missing(tmp_path: Path) -> None:
    source = """
import no_such_lightning as pl
from torch import nn

class Net(pl.LightningModule):
    def __init__(self, vocab_size, n_embd=8, *, n_layer=2, **more):
        super().__init__()
        self.save_hyperparameters(ignore=["n_layer"])
        self.wte = nn.Embedding(self.hparams.vocab_size, self.hparams["n_embd"])

    def forward(self, ids):
        return self.wte(ids)
"""
    model = build(tmp_path, source, None, GPT2Config(vocab_size=89, n_embd=24, n_layer=3))
    assert model.wte.weight.shape == (89, 24) and model.device == torch.device("cpu")
    assert dict(model.hparams) == {"vocab_size": 89, "n_embd": 24, "n_layer": 3}


def test_an_encoder_decoder_is_not_selected_instead_of_the_language_model(tmp_path: Path) -> None:
    """This is true although it is the last class and its own code has attention."""
    model = "        self.tok = nn.Embedding(vocab_size, d_model)\n\n    def forward"
    init = "    def __init__(self, vocab_size, d_model):\n        super().__init__()\n" + model
    source = (
        f"from torch import nn\n\nclass Text(nn.Module):\n{init}(self, inputs, tgt_mask=None):\n"
        "        return self.tok(inputs)\n\n"
        f"class Translation(nn.Module):\n{init}(self, src_ids, tgt_ids, src_mask=None):\n"
        "        attention = self.tok(src_ids).softmax(-1)\n        return self.tok(tgt_ids)\n"
    )
    notes: list[str] = []
    path = write(tmp_path / "both.py", source)
    assert load_target(str(path), notes).__name__ == "Text"  # type: ignore[attr-defined]
    [note] = notes
    assert "because it takes one sequence" in note and f"{path}:Translation" in note
    path = write(tmp_path / "one.py", source.replace("class Text(nn.Module)", "class Text"))
    assert load_target(str(path)).__name__ == "Translation"  # type: ignore[attr-defined]
