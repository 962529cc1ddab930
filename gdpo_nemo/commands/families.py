"""``gdpo-nemo families``: print the supported model families as a Markdown table, which docs/models.md contains."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import Commands, say
from gdpo_nemo.models.architectures import last_name, linear_layers
from gdpo_nemo.models.families import FAMILIES, Family

COLUMNS = ("`model_type`", "MLP", "q, k, v", "rope scalings", "LoRA on", "layouts")


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("families", help="print the table of supported model families")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    say(table())
    return 0


def table() -> str:
    """Return the Markdown table of all families, ordered by ``model_type``."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(row, FAMILIES.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(family: Family) -> tuple[str, ...]:
    """Return a family's cells of the table."""
    modules = family.modules
    mlp = "experts" if family.experts else "dense"
    mlp = f"dense or {mlp}, Mamba-2 layers" if family.mamba else mlp
    qkv = ["one matrix" if len(modules.qkv) == 1 else "three matrices"]
    qkv += [f"biases if `{family.qkv_bias}`" if isinstance(family.qkv_bias, str) else "biases"] * bool(family.qkv_bias)
    qkv += ["norms on q and k"] * family.qk_norm
    rope = ", ".join(kind for kind in family.rope_types if kind != "default")
    experts = {last_name(name) for name in modules.mlp} if family.experts and family.pattern is None else set()
    adapted = [name for name in linear_layers(family) if name not in experts]
    return (
        f"`{family.model_type}`",
        mlp,
        ", ".join(qkv),
        rope or ("none" if family.rope_types else "no rotary embedding"),
        " ".join(f"`{name}`" for name in adapted),
        "TP PP CP DP" + " EP ETP" * bool(family.experts),
    )
