"""``gdpo-nemo families``: print a table of the supported model families. docs/models.md contains it as Markdown."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, say, terminal
from gdpo_nemo.models.architectures import has_optional_experts, linear_layers
from gdpo_nemo.models.families import FAMILIES, Family

COLUMNS = ("`model_type`", "MLP", "q, k, v", "also", "rope scalings", "LoRA on", "layouts")

_WINDOWS = {
    "all": ["windows in all layers"],
    "late": ["windows in some layers"],
    "periodic": ["windows in some layers"],
}


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("families", help="list the supported model families and their layouts")
    command.add_argument(
        "--markdown",
        action="store_true",
        help="print the table of docs/models.md, which also lists the layers that LoRA adapts",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.markdown:
        say(table())
        return 0
    from rich import box
    from rich.table import Table

    # The names of the layers that LoRA adapts would take more than half of the lines of a terminal.
    kept = [index for index, name in enumerate(COLUMNS) if name != "LoRA on"]
    shown = Table(box=box.SIMPLE, pad_edge=False)
    for index in kept:
        shown.add_column(COLUMNS[index].strip("`"), no_wrap=index == 0)
    for family in FAMILIES.values():
        cells = row(family)
        shown.add_row(*(cells[index].replace("`", "") for index in kept))
    terminal().print(shown)
    return 0


def table() -> str:
    """Return the Markdown table of all families, ordered by ``model_type``."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, FAMILIES.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _particulars(family: Family) -> list[str]:
    """Return the differences from Llama that no other column contains."""
    rotary = " and ".join(["partial"] * family.partial_rotary + ["interleaved"] * bool(family.rotary_pairs))
    mixture = family.experts
    experts = ["sigmoid router"] * bool(mixture and mixture.sigmoid)
    if mixture and (mixture.shared or mixture.shared_width):
        experts += ["a dense MLP beside experts" if mixture.beside else "shared experts"]
    experts += [f"latent vectors of experts if `{mixture.latent_size}`"] if mixture and mixture.latent_size else []
    mamba = ["Mamba-2 layers"] * bool(family.mamba) + ["gated delta net layers"] * bool(family.delta)
    mamba += ["gates of the attention's output"] * family.output_gate
    norms = ["norms of outputs"] * bool(family.modules.post_attention_norm)
    norms += ["queries scaled by position"] * bool(family.query_scale)
    norms += ["other heads in layers without a window"] * bool(family.global_heads)
    norms += ["a factor of each layer's output"] * bool(family.layer_scale)
    images = ["images", "positions by time, row and column"] * bool(family.tower)
    norms += ["features of images in several layers"] * bool(family.tower and family.tower.deepstack)
    norms += [f"{rotary} rotary embedding"] * bool(rotary)
    return images + _WINDOWS.get(family.windows, []) + mamba + experts + norms


def row(family: Family) -> tuple[str, ...]:
    """Return a family's cells of the table."""
    modules = family.modules
    mlp = "dense or experts" if has_optional_experts(family) else "experts" if family.experts else "dense"
    qkv = ["one matrix" if len(modules.qkv) == 1 else "three matrices"]
    if family.latent:
        qkv = ["latent vectors"] + ["sparse indices"] * bool(family.latent.index)
    qkv += [f"biases if `{family.qkv_bias}`" if isinstance(family.qkv_bias, str) else "biases"] * bool(family.qkv_bias)
    norms = "norms on all heads of q and k" if family.qk_norm_of_layer else "norms on q and k"
    norms = "norms on q, k and v" if family.value_norm else norms
    norms += f" if `{family.qk_norm}`" if isinstance(family.qk_norm, str) else ""
    qkv += [norms] * bool(family.qk_norm) + ["sinks"] * bool(family.sinks)
    rope = ", ".join(kind for kind in family.rope_types if kind != "default")
    return (
        f"`{family.model_type}`",
        mlp,
        ", ".join(qkv),
        ", ".join(_particulars(family)) or "-",
        rope or ("none" if family.rope_types else "no rotary embedding"),
        " ".join(f"`{name}`" for name in linear_layers(family)),
        "TP PP CP DP" + " EP" * bool(family.experts) + " ETP" * (bool(family.experts) and not family.biases),
    )
