r"""Find the arguments of Megatron-LM in a text: a shell script, YAML, or the list that a training run prints.

    --num-layers 32 \                    a script: arguments wherever they stand, with variables that it sets
    num_layers: 32                       YAML, also of Megatron-Bridge: the names of tables above a key do not matter
    num_layers ............ 32           the list that a training run prints before its first step

A script is never run: `$NAME` and `${NAME:-32}` are looked up among its assignments, `$((8 * $NODES))` is computed, and
arguments of all branches count.
"""

from __future__ import annotations

import re

SEVERAL = "\0"  # between values of an argument that has several
ASSIGNMENT = re.compile(r"^[ \t]*(?:(?:export|local|declare)[ \t]+)?([A-Za-z_]\w*)=([^\s(].*)?$", re.M)
ASSIGNED = re.compile(r"^\s*(?:(?:export|local|declare)\s+)?[A-Za-z_]\w*\+?=")
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^}\n]{0,300}))?\}|\$([A-Za-z_]\w*)")
ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
COMPUTABLE = re.compile(r"\s*\d{1,12}(\s*[-+*/]\s*\d{1,12})*\s*")
TERM = re.compile(r"\s*([-+*/])?\s*(\d{1,12})")
SBATCH = re.compile(r"^#SBATCH\s+--(nodes|ntasks-per-node|gpus-per-node)[= ](\d{1,6})\s*$", re.M)
PRINTED = re.compile(r"^[ \t]*(?:\S+[ \t]+)?([A-Za-z]\w*) \.{3,} (.*)$", re.M)
YAML = re.compile(r"^[ \t]*(?:- )?(?:--)?([A-Za-z_][\w-]*)[ \t]*:[ \t]+(\S.*)$", re.M)
OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?")
COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.M)
NO_COMMAND = re.compile(r"\s*echo\b|[-\w|\s]*\)\s*$")  # a message; the label of a case
MAX_VALUE = 300  # characters of a variable with the variables in it replaced; a longer one is not looked up
MAX_DEPTH = 8  # of variables in variables
MAX_VALUES = 9  # of one name, that are told apart
TRUE_BY_DEFAULT = ("add_bias_linear", "gradient_accumulation_fusion", "group_query_attention")
NAMES = {  # other names of the same arguments: those of Megatron's and Megatron-Bridge's configurations, and old ones
    "num-moe-experts": "num-experts", "nproc-per-node": "gpus-per-node", "num-gpus-per-node": "gpus-per-node",
    "nnodes": "nodes", "num-nodes": "nodes", "virtual-pipeline-model-parallel-size": "virtual-stages",
    "num-virtual-stages-per-pipeline-rank": "virtual-stages", "model-parallel-size": "tensor-model-parallel-size",
    "fp8": "fp8-format", "share-embeddings-and-output-weights": "share-embeddings",
}  # fmt: skip
SWITCHES = (  # arguments without a value, as far as a job has to do with them
    "group-query-attention", "swiglu", "squared-relu", "quick-geglu", "disable-bias-linear", "add-qkv-bias",
    "untie-embeddings-and-output-weights", "qk-layernorm", "multi-latent-attention", "sequence-parallel",
    "use-distributed-optimizer", "bf16", "fp16", "recompute-activations", "use-flash-attn", "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32", "overlap-grad-reduce", "overlap-param-gather", "use-megatron-fsdp",
    "use-custom-fsdp", "use-torch-fsdp2", "no-gradient-accumulation-fusion", "no-overlap-p2p-communication",
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "use-rotary-position-embeddings", "no-position-embedding", "fp8-dot-product-attention",
    "fp8-multi-head-attention", "enable-cuda-graph", "external-cuda-graph",
)  # fmt: skip


def is_megatron(text: str) -> bool:
    """Return whether a text has arguments of Megatron-LM: the number of layers, in one of the three forms."""
    return (
        re.search(r"(^|[\s\"'(])--num-layers\b|^[ \t]*num_layers[ \t]*:\s|\bnum_layers \.{3,} ", text, re.M) is not None
    )


def find_arguments(text: str) -> dict[str, str]:
    """Return all arguments by name, without dashes before it; several values of one are joined by SEVERAL."""
    if re.search(r"\bnum_layers \.{3,} ", text):
        printed = [(name, value.strip()) for name, value in PRINTED.findall(text)]
        return _named([(name, value) for name, value in printed if value != "False" or name in TRUE_BY_DEFAULT])
    plain = COMMENT.sub("", text).replace("\\\n", " ")
    if not re.search(r"--num-layers[\s=\"']", plain):
        return _named([(name, value.strip().strip("\"'")) for name, value in YAML.findall(plain)])
    slurm = [(f"slurm-{name}", value) for name, value in SBATCH.findall(text)]
    return _named([*slurm, *_options(plain, _variables(plain))])


def _named(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return the pairs by one name for each argument, without those that say that there is nothing."""
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        key = name.replace("_", "-")
        values = found.setdefault(NAMES.get(key, key), [])
        if value not in ("None", "null", "~", "", *values) and len(values) < MAX_VALUES:
            values.append(value)
    return {name: SEVERAL.join(values) for name, values in found.items() if values}


def _variables(text: str) -> dict[str, str]:
    """Return the variables that a script sets, with all of their values where there are several."""
    found: dict[str, list[str]] = {}
    for name, given in ASSIGNMENT.findall(text):
        value = given.strip()
        if value[:1] in ("'", '"'):
            value = value[1:].split(value[0])[0]
        elif not value.startswith("$(("):
            value = re.split(r"[\s;]", value)[0]
        values = found.setdefault(name, [])
        default = re.fullmatch(r"\$\{" + name + r":?-([^}]*)\}", value)
        if default:  # its own value, or this one: a default gives way to what was set before
            value = value if values else default.group(1).strip("\"'")
        if value not in values and not (default and values) and len(values) < MAX_VALUES:
            values.append(value)
    return _resolved({
        name: (" " if any("--" in value for value in values) else SEVERAL).join(values)
        for name, values in found.items()
    })  # fmt: skip


def _resolved(variables: dict[str, str]) -> dict[str, str]:
    """Return variables with those in them replaced; one that gets too long, or whose value is not set, is left out."""
    short = {name: value for name, value in variables.items() if len(value) <= MAX_VALUE}
    found = {}
    for name, value in short.items():
        for _ in range(MAX_DEPTH):
            if "$" not in value or len(value) > MAX_VALUE:
                break
            value = _looked_up(value, short)
        if len(value) <= MAX_VALUE:
            found[name] = value
    return found


def _options(text: str, variables: dict[str, str]) -> list[tuple[str, str]]:
    """Return every option of a script with its values, which end at the next option or at the line's end."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if "-" not in line or NO_COMMAND.match(line):
            continue
        words = re.sub(r"[\"'();]", " ", _looked_up(ASSIGNED.sub("", line), variables)).split()
        at_option = False  # whether the last word may have values
        for word in words:
            if option := OPTION.fullmatch(word):
                name, value = option.groups()
                found.append((name, [] if value is None else [value]))
                at_option = value is None and name not in SWITCHES
            elif at_option:
                found[-1][1].append(word)
    return [(name, " ".join(values) or "true") for name, values in found]


def _looked_up(text: str, variables: dict[str, str]) -> str:
    """Return a text with the variables in it replaced, as far as the script sets them, and sums computed."""

    def value(match: re.Match[str]) -> str:
        name, otherwise, bare = match.groups()
        known = variables.get(name or bare, otherwise)
        return match.group() if known is None else known.strip("\"'")

    def computed(match: re.Match[str]) -> str:
        names = re.sub(r"\b[A-Za-z_]\w*", lambda word: variables.get(word.group(), word.group()), match.group(1))
        return str(_sum(names)) if COMPUTABLE.fullmatch(names) else match.group()

    return ARITHMETIC.sub(computed, VARIABLE.sub(value, text))


def _sum(expression: str) -> int:
    """Return the value of whole numbers with operators between them, products and quotients first."""
    total, product, sign = 0, 0, 1
    for operator, digits in TERM.findall(expression):
        number = int(digits)
        if operator == "*":
            product *= number
        elif operator == "/":
            product = product // number if number else 0
        else:
            total += sign * product
            product, sign = number, -1 if operator == "-" else 1
    return total + sign * product
