"""The names that authors give to the hyperparameters of a GPT-2, and the checkpoint's values."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from compat.config import GPT2Config

# A role is a field of GPT2Config or a key of `value_of`. The first pattern that matches a whole
# name decides; names are compared in lower case and without underscores.
_N = r"(n|num|number(of)?|max|total)?"
_SIZE = r"(d|dims?|dimension(s|ality)?|size|width)"
_EMB = r"(emb|embd|embeds?|embeddings?|embedded)"
# Not the end of `cutoff`, `diff`, `buff` or `coeff`.
_MLP = r"((?<![oiu])(?<!coe)ff|ffn|ffwd?|mlp|mlpmid(dle)?|feedforward|inner|intermediate)"
_LENGTH = r"(len|length|size|window)"
_WITH = "(use|using|add|include|enable|has|have|with|is)"
# The width of all heads, which is that of the stream, or the width of one head.
_ATTENTION = rf"(att|attn|attention)(inner|hidden)?{_SIZE}|{_SIZE}(att|attn|attention)"
# What has a bias in GPT-2; other models also have biases for positions and experts.
_BIASED = (
    rf"({_MLP}|att|attn|attention|msa|mha|self|kv|[qkvocw]|qk|query|keys?|values?|in|out|output|proj"
    r"(ection)?|up|down|gate|fc[12]?|linears?|dense|hidden|layers?|blocks?|model|gpt|transformer"
    r"|decoder|all|shared|extra)"
)
_PATTERNS = {
    "embd_pdrop": rf"({_EMB}|pos).*drop.*|.*drop.*{_EMB}",
    "attn_pdrop": r"att.*drop.*|.*drop.*att.*",
    "resid_pdrop": r".*drop(out)?(rate|prob(ability)?)?|.*pdrop|drop(out)?.*",
    "layer_norm_epsilon": r"(.*[^t])?eps(ilon)?",
    "head_bias": r".*(head|output)bias",
    "qkv_bias": rf"{_WITH}?(self|attn|attention|causal)*(attn|attention|qkv|kqv|kvq)bias|biasqkv",
    "layer_norm_bias": r".*(norm|ln)bias",
    "bias": rf"{_WITH}?{_BIASED}*bias(es|linear)?",
    "tie_word_embeddings": rf"tied?|(use)?(tied?|shared?)(word)?({_EMB})?(weights?|{_EMB})"
    rf"|(use)?(weight|{_EMB})(tie|tying)",
    "init": r"(weight)?init(ializer)?(range|std|scale)",
    "activation_function": r"(hidden)?act(ivation)?(fn|function|type|name)?|nonlinearity|afn",
    "pre_norm": r"(is|use)?pre(layer)?(norm(ali[sz]ation)?|ln)|normfirst"
    r"|((en|de)coder)?normali[sz]ebefore",
    "causal": r"(is|use|apply|with)?causal((self)?(attention|attn))?(mask(ing)?)?|masked"
    r"|(use|apply|with)?mask(ed|ing)?(self)?(attention|attn)",
    "residual": r"(with|use|has)?(residuals?|skip)(connections?)?",
    "device": r"device",
    "max_batch": r"max(imum)?(kv)?(cache)?batch(size)?",
    "off": r"(use)?(rms(norm)?|rope|rotary(emb(eddings)?)?|alibi|(squared)?relu|swiglu|silu|moe"
    r"|sinusoidal(pos(itions?)?|emb(eddings)?)?|mlm|qknorm|gqa|normlast"
    r"|post(layer)?(norm(ali[sz]ation)?|ln)"
    r"|parallel(block|residual))",
    "on": r"(is)?decoderonly|isdecoder|(return|output|compute)?logits"
    r"|(with|use|has|add|include)(lm|output)?head"
    r"|(with|use|has|add|include|apply)((self)?att(entio)?n|ffn?|mlp|feedforward"
    r"|(final|output)?(layer)?norm(s|ali[sz]ation)?|ln)"
    rf"|(with|use|has|add|include)(pos|positions?|positional)({_EMB}|encodings?)?",
    "cap": r"(attn|attention|final|output|score|logits?)*(soft)?cap(ping)?|softcap.*",
    "vocab_size": rf".*vocab(ulary)?({_SIZE}|len|n|in(put)?|out(put)?)*(orconfig.*)?"
    rf"|(n|num)?tokens|(n|num)token|tokencount|dict(ionary)?size|{_N}words|output{_SIZE}|voc(size|len)"
    r"|max(imum)?token(value|id|index)|(alphabet|charset|lexicon)size|(n|num)(unique)?(chars|characters|symbols)"
    r"|(n|num)?unique(tokens|words)",
    "ratio": r"(mlp|ffn?|ffdim|hidden|dim|inner|forward|widening)(ratio|mult(iplier)?|factor)"
    r"|(mlp|ffn?)(hidden|dim|inner)?mult(iplier)?|(mlp|ffn?|forward)?expansion(factor)?|multiplier",
    "d_head": rf".*head({_SIZE}|channels|n?emb(e?d)?)|{_SIZE}(q|k|qk|v)?(per)?head"
    r"|d(im)?(k|v|q|qk|qkv|key|value)|n(key|query|value)s?|(query)?(key|query|val(ue)?)s?(dim|size)|querypreattn(scalar|norm)",
    # Each query has a key of its own, and the MLP has one hidden layer.
    "one": r"(n|num)?(queries|queryheads|qheads|heads)per(key|kv|kvhead|keyhead|group)s?"
    r"|(n|num)?(mlp|ffn?|feedforward)(hidden)?layers",
    # As many groups of queries as heads are not grouped.
    "n_head": r".*heads.*|(n|num).*head(er)?|head(count|num|number)|nattn|nh"
    r"|(n|num)?(kv|query|keyvalue)groups?",
    "n_layer": r".*(layers|blocks|decoders|stacks)(total)?"
    r"|(n(?!orm)|num).*(layer|block|decoder|stack)|(n|num)trans(former)?s?|layer|(layer|block|decoder)s?n"
    r"|(decoder|transformer|attn|attention)?(layer|block|decoder)s?(count|num|number)"
    r"|(model|decoder|transformer|net|network)?depth|nl",
    "n_positions": rf".*(pos|positions?|ctx|context|seq|sequence|seg|segment|block){_LENGTH}+"
    r"|(max)?rel(ative)?(pos(ition)?|dist(ance)?)(len(gth)?)?"
    rf"|(d|{_N})(pos|positions?|ctx|context|seq|block)|(max|num)pos(ition)?{_EMB}"
    rf"|pos(ition(al)?)?{_EMB}(len(gth)?|count|num(ber)?)"
    r"|.*(num)?max(abs(olute)?)?pos(itions?)?|n(dec|enc)seq"
    r"|(max|input|maxtoken)len(gth)?|(max)?(sent(ence)?|text|prompt)len(gth)?"
    r"|length|maxtokens|maxsequence|bptt|window(size|len(gth)?)?|(text|token|input)?chunk(size|len(gth)?)|timesteps|nstep|maxt|tmax"
    r"|(pos|positions?|ctx|context|seq|sequence)capacity"
    r"|(len|length|size)(of)?(pos|positions?|ctx|context|seq|sequence)",
    "d_inner": rf"(?!chunk|({_ATTENTION})$).*{_MLP}({_EMB}?{_SIZE}|(num)?h(id(dens?)?)?{_SIZE}?)?"
    r"|nhid|proj(ection)?forward"
    rf"|(pf|fc|ffnn|feedfwd|fwd|forward|filter|mid(dle)?|expert){_SIZE}"
    rf"|(d|dim)(pf|fc|ffnn|mid|expert|inter)|(moe)?inter(nal)?{_SIZE}",
    "n_embd": rf".*{_EMB}({_SIZE}|len|num|number)|(d|dim|{_N}){_EMB}|(d|dim|n)(model|residual)"
    rf"|(model|residual|input|tok(en)?|feature|vec(tor)?|latent|chan(nel)?){_SIZE}"
    rf"|{_N}dims?|{_N}(channels|features)|n?width|nstate"
    rf"|(word)?{_EMB}proj(ection)?{_SIZE}"
    rf"|ninp|emsize|normalizedshape|d(in|out)|(len|length|size)(of)?({_EMB}|model)"
    rf"|{_ATTENTION}",
}  # fmt: skip
# Words of sizes in Spanish, Portuguese, French and German.
_TRANSLATED = {
    "tamano": "size", "tamaño": "size", "tamanho": "size", "taille": "size", "groesse": "size",
    "grosse": "size", "größe": "size", "vocabulario": "vocab", "vocabulaire": "vocab",
    "vokabular": "vocab", "dimension": "dim", "dimensao": "dim", "dimensión": "dim",
    "dimensão": "dim",
    "longitud": "seqlen", "comprimento": "seqlen", "longueur": "seqlen", "maxima": "",
    "maximo": "", "maximale": "", "contexto": "context", "contexte": "context",
    "kontext": "context", "secuencia": "seq", "sequencia": "seq", "bloque": "block",
    "bloco": "block", "bloques": "blocks", "blocos": "blocks", "cabezas": "heads",
    "cabecas": "heads", "cabeças": "heads", "tetes": "heads", "têtes": "heads",
    "koepfe": "heads", "köpfe": "heads", "capas": "layers", "camadas": "layers",
    "couches": "layers", "schichten": "layers", "numero": "num", "número": "num",
    "nombre": "num", "nb": "num", "anzahl": "num", "oculta": "hidden", "cachee": "hidden",
}  # fmt: skip
_OF = ("de", "du", "da", "do")
# Of global sizes, as in `G_N_EMBD` or `DEFAULT_DIM`, and of decoders, as in `d_model_decoder`.
_AFFIX = re.compile(
    r"(?i)^(g|global|default|gpt|cfg|my|lm|hp|decoder|dec)_(?=\w{2})|_(decoder|dec)$"
)
# How the names of switches begin: `use_blocks` is not a number of blocks.
_SWITCH = re.compile(r"(?i)(use|has|is|with|enable)_")
_MISSPELLED = {"embeding": "embedding", "dimention": "dimension", "lenght": "length"}
# Names such as `no_bias` and `disable_rope`, whose value is the opposite of the role's.
_NEGATED = re.compile(r"(?:no|not|disabled?|without|skip|omit|remove)(.+)")
_OPPOSITES = {"off": "on", "on": "off"} | dict.fromkeys(
    ("bias", "qkv_bias", "layer_norm_bias", "pre_norm", "causal", "residual"), "off"
)
_COMPILED = [(role, re.compile(pattern)) for role, pattern in _PATTERNS.items()]
_WIDE = re.compile(rf"(n|num|dim|d)?hiddens?{_SIZE}?|hdim|d(im)?hidn?")
# The width of the keys of one head, or of all heads.
_KEYS = re.compile(
    r"(d(im)?|n)(k|q|v|qk|qkv|key|query|value)s?|(query)?(key|query|value)s?(dim|size)"
    r"|(qk|v)(dim|size)"
)
# The second role applies if another name beside it has the first role.
_TWO_ROLES: list[tuple[re.Pattern[str], str, str | None]] = [
    (_WIDE, "n_embd", "d_inner"),
    (re.compile("(n|num)?tokens|(n|num)token|tokencount"), "vocab_size", None),
    (re.compile("nx"), "n_embd", "n_layer"),
    (re.compile("nblock"), "n_layer", "n_positions"),
    (re.compile("numembeddings"), "n_embd", "vocab_size"),
]
# The size of the vocabulary beside the width, if no other name denotes it; otherwise the width.
_INPUT = re.compile(rf"(tok(en)?|input){_SIZE}")
# The context length, or how far attention reaches if another name denotes the context length.
_WINDOW = re.compile(r"window(size|len(gth)?)?")
# How many query heads share a key head, if another name denotes the number of key heads.
_GROUPS = re.compile(r"(n|num)?(kv|query|keyvalue)groups?")
# The part of a head that is rotated, and the rest, if there are names for both.
_HEAD_PARTS = re.compile(rf"(qk)?(?P<part>nope|rope)(head)?{_SIZE}")
# Names of a number that is the width, where the value is known to be a number.
_EMBEDDING = re.compile(rf"(tok(en)?|word|input)?{_EMB}|{_EMB}(tok(en)?|word)s?|dm")
# The possible roles of names of one letter.
_LETTERS = {"v": "vocab_size", "t": "n_positions", "c": "n_embd", "d": "n_embd", "e": "n_embd"} | {
    "l": "n_layer", "n": "n_layer", "h": "n_head", "p": "resid_pdrop", "s": "n_positions"
}  # fmt: skip
NO_ID = -1  # of a padding token, so that a padding mask masks nothing
# Values for arguments that do not affect the logits.
_NEUTRAL: dict[str, Any] = dict.fromkeys(
    "padid ipad padidx padindex srcpadidx trgpadidx paddingidx paddingindex padtokenid "
    "padtoken".split(), NO_ID
) | {
    "modeltype": None, "name": "gpt2", "batchsize": 1, "batch": 1, "learningrate": 1e-3,
    "lr": 1e-3, "weightdecay": 0.0, "verbose": False, "debug": False, "seed": 0, "usecache": False,
    "kvcache": False, "gradientcheckpointing": False, "outputattentions": False,
    "outputhiddenstates": False, "usereturndict": False, "betas": (0.9, 0.999),
    "ropescaling": None, "memlen": 0, "memlength": 0, "tokenizer": None, "tokeniser": None,
    "logger": None,
    "dtype": torch.float32, "torchdtype": torch.float32, "paramdtype": torch.float32,
    "lorarank": 8, "lorar": 8, "loraalpha": 8, "theta": 10000.0, "torch": torch, "nn": torch.nn,
}  # fmt: skip
_NEUTRAL_PATTERNS = {re.compile(pattern): value for pattern, value in {
    # The score of masked tokens is finite, for code that multiplies it by the mask.
    r"(mask(ing|ed)?)?(minus|neg(ative)?)inf(inity)?|mask(ing|ed)?(fill)?value": -1e9,
    # With one expert, a mixture of experts is an MLP.
    r"(n|num|numberof)?(active|activated|routed|total|local|selected|shared)?(experts|topk)"
    r"(num|count|active|used|per(tok|token))?|expert(num|count)|(moe|expert|router)(topk|k)": 1,
    # Lengths of the training.
    r"(n|num|max|total|training|train|warmup|decay|log|logging|eval|val|save|checkpoint)+"
    r"(steps?|epochs?|iters?|iterations?|interval)": 1,
    "(rope|rotary).*(base|theta)(freq|frequency)?": 10000.0,
    "(partial)?rotary(pct|percent|percentage|factor|fraction)": 1.0,
}.items()}  # fmt: skip
# Names of the characters or words of a vocabulary, whose number the code takes.
_SYMBOLS = re.compile(
    r"(all|unique)?(char(acter)?s|symbols|alphabet|charset|vocab(ulary)?(ind(ex(er)?|ices)|list)?"
    r"|itos|(char|token|word|s)(2|to)(i|id|idx|ix|index))"
)
# Names of a constructor's config argument, and how the names of config classes end.
CONFIG_NAMES = set(
    "config configuration cfg conf args hparams hps hp hyperparameters hyperparams params opt opts "
    "options settings".split()
)
_CONFIG_NAME = re.compile(
    r"_(config|cfg|conf|args|hparams)$|[a-z](Config|Cfg|Conf|Args)$"
    r"|^(config|cfg|conf|args|hparams|params|model)_(dict|kwargs|params)$"
)
# What a language model classifies its tokens as, which are those of its vocabulary.
CLASSES = re.compile("(n|num|number(of)?|output)?(classes|labels)")
CONFIG_CLASSES = tuple("config cfg conf args hparams params parameters settings".split())
# A default of None for these may mean a module or a list as well as a number.
AMBIGUOUS = set(
    "block blocks emb embed embedding features ff ffn layer layers mlp tokens words".split()
)
SIZES = set("vocab_size n_positions n_embd n_layer n_head d_inner d_head half_head ratio".split())
_FIELDS = {field.name.replace("_", ""): field.name for field in fields(GPT2Config)}


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Return a name as it is compared: `n_embd`, `nEmbd` and `N_EMBD` are equal."""
    name = name.lower()
    for wrong, right in _MISSPELLED.items():
        name = name.replace(wrong, right)
    words = re.split(r"[_-]", name)
    if len(words) > 1 and not _TRANSLATED.keys().isdisjoint(words):
        words = [english for word in words if (english := _TRANSLATED.get(word, word)) not in _OF]
        words.sort(key=lambda word: word == "size")  # `tamano_vocabulario` is a `vocab_size`
    return "".join(words)


def role_of(name: str, among: Collection[str] = ()) -> str | None:
    """Return the role that a name denotes, or None.

    Args:
        name: The name of an argument, a key or an attribute.
        among: The names beside it. `hidden_size` is the width of the MLP's hidden layer if one of
            them stands for the width of the residual stream, and otherwise this width itself. A
            letter has no role that a longer name has.
    """
    return _role_among(name, frozenset(among))


@lru_cache(maxsize=4096)  # the same few names are tried again in every trial of arguments
def _role_among(name: str, among: frozenset[str]) -> str | None:
    short = plain(name)
    if _AFFIX.search(name) and _only_role(short) is None:
        return _role_among(_AFFIX.sub("", name, count=1), among)
    if _INPUT.fullmatch(short):
        roles = {role_of(other) for other in among if not _INPUT.fullmatch(plain(other))}
        return "vocab_size" if "n_embd" in roles and "vocab_size" not in roles else "n_embd"
    if is_window(name):
        others = [other for other in among if not _WINDOW.fullmatch(plain(other))]
        if any(role_of(other) == "n_positions" for other in others):
            return None
    if _GROUPS.fullmatch(short) and any("kv" in plain(o) and role_of(o) for o in among - {name}):
        return "one"
    if part := _HEAD_PARTS.fullmatch(short):
        matches = map(_HEAD_PARTS.fullmatch, map(plain, among))
        if any(other is not None and other["part"] != part["part"] for other in matches):
            return "half_head"
    for pattern, first, second in _TWO_ROLES:
        if pattern.fullmatch(short):
            beside = (other for other in among if not pattern.fullmatch(plain(other)))
            roles = {role_of(o, among if _INPUT.fullmatch(plain(o)) else ()) for o in beside}
            if short == "hiddendim" and "hiddensize" in map(plain, among):
                return second
            return second if first in roles and second not in roles else first
    if short in _LETTERS:
        role, letters = _LETTERS[short], {plain(other) for other in among}
        if short == "n" and "l" in letters:  # the layers
            role = "n_positions" if "h" in letters else "n_head"
        longer = {role_of(other) for other in among if len(plain(other)) > 1}
        return None if role in longer else role
    only = _only_role(short)
    return None if only in SIZES and _SWITCH.match(name) else only


def size_role(name: str, among: Collection[str] = ()) -> str | None:
    """Return the role of a name if it is a size, or None."""
    role = role_of(name, among)
    return role if role in SIZES else None


@lru_cache(maxsize=4096)
def _only_role(short: str) -> str | None:
    """Return the role of a plain name that has at most one."""
    if (negated := _NEGATED.fullmatch(short)) and (role := _only_role(negated[1])) in _OPPOSITES:
        return _OPPOSITES[role]
    matching = (role for role, pattern in _COMPILED if pattern.fullmatch(short))
    return next(matching, None) or _FIELDS.get(short)


def is_ambiguous_size(name: str) -> bool:
    """Return whether a name such as `token_size` may denote the vocabulary, width or context."""
    return _INPUT.fullmatch(plain(name)) is not None


def is_window(name: str) -> bool:
    """Return whether a name may denote how far attention reaches, as well as the context length."""
    return _WINDOW.fullmatch(plain(name)) is not None


def role_of_number(name: str, among: Collection[str] = ()) -> str | None:
    """Return the role of a name for a number, so that `tok_emb` or `head` is not a module."""
    role = "n_embd" if _EMBEDDING.fullmatch(plain(name)) else None
    role = "n_head" if plain(name) == "head" else role
    if role and any(role_of(other, among) == role for other in among if other != name):
        role = None
    return role_of(name, among) or role


def is_config_name(name: str) -> bool:
    """Return whether a name denotes a config, such as `cfg` or `train_cfg`."""
    return plain(name) in CONFIG_NAMES or bool(_CONFIG_NAME.search(name))


def takes_sizes(names: Collection[str]) -> bool:
    """Return whether parameters of these names are the sizes of a model, and not its config."""
    among = frozenset(names)
    return sum(role_of(name, among) in SIZES for name in names) > 1


def meanings(name: str) -> tuple[str, ...]:
    """Return the possible roles of an ambiguous name, such as `hidden_size`; else none."""
    if plain(name) == "n":
        return "n_layer", "n_positions", "n_embd"
    if _KEYS.fullmatch(plain(name)):
        return "d_head", "n_embd"
    if re.fullmatch(_ATTENTION, plain(name)):
        return "n_embd", "d_head"
    return ("n_embd", "d_inner", "d_head") if _WIDE.fullmatch(plain(name)) else ()


def value_of(role: str, config: GPT2Config) -> Any:
    """Return the checkpoint's value for a role."""
    ratio = config.d_inner / config.n_embd
    ours = {
        "ratio": int(ratio) if ratio.is_integer() else ratio,
        "bias": True,
        "head_bias": False,
        "init": 0.02,
        "pre_norm": True,
        "causal": True,
        "residual": True,
        "off": False,
        "on": True,
        "cap": None,
        "one": 1,
        "half_head": config.n_embd // config.n_head // 2,
        "device": "cpu",
        "max_batch": _most_rows(config),
    }
    if role == "pad_token_id" and config.pad_token_id is None:
        return NO_ID
    if role in ("bos_token_id", "eos_token_id") and getattr(config, role) is None:
        return config.vocab_size - 1  # a number, because code may compare ids with it
    return ours[role] if role in ours else getattr(config, role)


def _most_rows(config: GPT2Config) -> int:
    """Return more rows than the proof passes, or fewer if a KV cache would take over 2 GB."""
    row = 2 * config.n_layer * config.n_positions * config.n_embd * 4  # bytes in float32
    return 66 if 66 * row < 2e9 else 16


def symbols(name: str, config: GPT2Config) -> str:
    """Return as many characters as the vocabulary has, if an argument's name means these."""
    wanted = _SYMBOLS.fullmatch(plain(name)) is not None
    return "".join(map(chr, range(0x100, 0x100 + config.vocab_size))) if wanted else ""


def neutral(name: str) -> tuple[bool, Any]:
    """Return whether an argument of this name has a value without the checkpoint, and the value.

    Most of these arguments do not affect the logits.
    """
    short = plain(name)
    for pattern, value in _NEUTRAL_PATTERNS.items():
        if pattern.fullmatch(short):
            return True, value
    return short in _NEUTRAL, _NEUTRAL.get(short)
