"""Translation of a recipe's NeMo Gym agents, their reward components and their rows, from the files of a Gym checkout.

A recipe lists its servers by ``env.nemo_gym.config_paths``, which are files of NeMo Gym. The names of agents and reward
components are therefore only known with a checkout. NeMo Gym's code is parsed, never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_nemo.config.rollout_checks import TURNS_KEPT
from gdpo_nemo.environments.nemo_gym.checkout import Instance, Unknown, component_names, config_contents, instances_of
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import Findings
from gdpo_nemo.utils.files import real_path

NAME = "nemo_gym"
"""Name of the environment in the translated config, which is also NeMo-RL's name."""
SUBMODULE = "3rdparty/Gym-workspace/Gym"
"""Folder of NeMo Gym in a checkout of NeMo-RL. Recipes use it in the paths of their rows."""
_SECTION = "env.nemo_gym."
_OF_NEMO_RL = ("port_range_low", "port_range_high", "is_trajectory_collection", "num_gpu_nodes", "effort_levels",
               "pad_dynamic_image_shapes", "thinking_tags", "invalid_tool_call_patterns", "uv_venv_dir", "uv_cache_dir",
           "skip_venv_if_present")  # fmt: skip
"""Keys of ``env.nemo_gym`` that do not describe servers: NeMo-RL or NeMo Gym's own launcher reads them."""
_THINKING = "policy_model.responses_api_models.vllm_model.extra_body.chat_template_kwargs"
_FIRST_PORT = 5000
_SHORTEST_TURN = 16
"""Number of tokens that a turn with its template has at least."""


@dataclass(frozen=True)
class Gym:
    """Agents of a recipe, with the names of the reward components of their resources servers."""

    agents: Mapping[str, Mapping[str, Any]]
    """Settings of the agents by instance name."""
    names: tuple[str, ...]
    """Reward components that are trained, sorted by name. This is the order of NeMo-RL's weights."""
    complete: bool
    """True if every server returns all components."""


def uses_gym(recipe: Recipe) -> bool:
    """Return whether NeMo Gym's agents produce the recipe's samples."""
    return bool(recipe.get("env.should_use_nemo_gym"))


def checkout_of(recipe: Recipe) -> Path | None:
    """Return the folder of NeMo Gym: the given one, or the submodule of the NeMo-RL checkout that has the recipe."""
    if recipe.gym_checkout is not None:
        return recipe.gym_checkout
    folders = (Path.cwd(), *real_path(recipe.path).parents)
    return next((f / SUBMODULE for f in folders if (f / SUBMODULE / "resources_servers").is_dir()), None)


def find_gym(recipe: Recipe) -> Gym:
    """Return the recipe's agents and reward components. Raises Unknown if they cannot be determined.

    Raises:
        Unknown: if no checkout is available, or its files do not determine the agents or the components.
        ConfigError: if a file of the checkout is not readable.
    """
    checkout = checkout_of(recipe)
    if checkout is None:
        raise Unknown("give a checkout of NeMo Gym with --gym-checkout to find them")
    instances = _instances(recipe, checkout)
    agents = {}
    for name, (kind, _, settings) in instances.items():
        if kind == "responses_api_agents" and "entrypoint" in settings:  # otherwise only changes to a server
            agents[name] = settings
    if not agents:
        raise Unknown("no file in config_paths defines an agent")
    if recipe.get("grpo.adv_estimator.name") != "gdpo":
        return Gym(agents, ("reward",), True)
    by_server = {name: _names_of_server(instances, name, checkout) for name in _servers_of(agents)}
    names = tuple(sorted(set().union(*by_server.values())))
    if len(names) < 2:
        raise Unknown(f"GDPO requires several reward components, but {', '.join(by_server)} returns only reward")
    return Gym(agents, names, all(set(found) == set(names) for found in by_server.values()))


def environment(recipe: Recipe, gym: Gym) -> dict[str, Any]:
    """Return the options of the environment ``nemo_gym_agent``, with ports that ``gdpo-nemo gym up`` uses."""
    low = recipe.get(f"{_SECTION}port_range_low", _FIRST_PORT)
    urls = {}
    for index, (name, settings) in enumerate(gym.agents.items()):
        host = settings.get("host") or "127.0.0.1"
        urls[name] = f"http://{host}:{settings.get('port') or low + 1 + index}"
    path = {"path": "reward"} if gym.names == ("reward",) else {}
    missing = "error" if gym.complete else "zero"  # NeMo-RL fills in 0 for absent components
    return {
        "plugin": "nemo_gym_agent",
        "agents": urls,
        "rewards": [{"name": name, **path, "missing": missing} for name in gym.names],
        **({"check_sum": True} if not path else {}),
        "global_config": global_config(recipe),
    }


def set_rollouts(recipe: Recipe, gym: Gym, findings: Findings) -> None:
    """Set the endpoint that the agents sample from, and the limits of an episode."""
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    samples = recipe.get("grpo.num_prompts_per_step") * recipe.get("grpo.num_generations_per_prompt")
    steps = [settings.get("max_steps") for settings in gym.agents.values()]
    limits = [limit for limit in steps if isinstance(limit, int)]
    most = max(1, TURNS_KEPT // (samples * (1 + recipe.staleness)))
    turns, why = longest // _SHORTEST_TURN, "the agents have no max_steps; the context length ends an episode"
    if len(limits) == len(steps):
        turns, why = max(limits), "max_steps of the agents"
    if turns > most:
        findings.differs("env.nemo_gym.max_steps", f"an episode has at most {most} turns instead of {turns}")
    findings.set("rollout.endpoint.enabled", True, "the agents sample from the run's endpoint")
    findings.set("rollout.turns.max_turns", max(1, min(turns, most)), why)
    findings.set("rollout.turns.max_tokens", longest - 1, "the context length limits an episode")
    template = _settings(recipe).get("policy_model", {})
    for key in _THINKING.split(".")[1:]:
        template = template.get(key, {}) if isinstance(template, dict) else {}
    for split in ("train", "validation") if template else ():
        if f"data.{split}.path" in findings.values:
            findings.set(f"data.{split}.chat_template_kwargs", template, f"env.nemo_gym.{_THINKING}")


def rows_path(recipe: Recipe, path: str) -> str:
    """Return the path of a recipe's rows, in the checkout of NeMo Gym if the checkout contains the file."""
    checkout = checkout_of(recipe)
    if not uses_gym(recipe) or checkout is None:
        return path
    file = checkout / path.partition(f"{SUBMODULE}/")[2] if f"{SUBMODULE}/" in path else checkout / path
    return str(file) if file.is_file() else path


def global_config(recipe: Recipe) -> dict[str, Any]:
    """Return NeMo Gym's part of ``env.nemo_gym``: ``config_paths``, and changes to the servers.

    Template arguments are removed, because the endpoint renders every prompt with those of ``data``.
    """
    content = {key: value for key, value in _settings(recipe).items() if key not in _OF_NEMO_RL}
    node: Any = content
    *parents, last = _THINKING.split(".")
    above = []
    for key in parents:
        above.append((node, key))
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict) and node.pop(last, None) is not None:
        for parent, key in reversed(above):
            if parent[key] == {}:
                del parent[key]
    return content


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the section ``env.nemo_gym`` as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in recipe.flat.items():
        if key.startswith(_SECTION):
            *sections, name = key.removeprefix(_SECTION).split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    return tree


def _instances(recipe: Recipe, checkout: Path) -> dict[str, Instance]:
    """Return the servers by instance name, from ``config_paths`` and the recipe itself."""
    paths = recipe.get(f"{_SECTION}config_paths") or []
    return instances_of((*config_contents(paths, checkout), _settings(recipe)))


def _servers_of(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    servers = []
    for agent, settings in agents.items():
        reference = settings.get("resources_server")
        name = reference.get("name") if isinstance(reference, dict) else None
        if not isinstance(name, str):
            raise Unknown(f"the agent {agent} does not name a resources server")
        servers.append(name)
    return list(dict.fromkeys(servers))


def _names_of_server(instances: Mapping[str, Instance], name: str, checkout: Path) -> set[str]:
    """Return the components of a server (empty for a single reward)."""
    if name not in instances or instances[name].kind != "resources_servers":
        raise Unknown(f"no file in config_paths defines the resources server {name}")
    _, implementation, settings = instances[name]
    return component_names(checkout / "resources_servers" / implementation, str(settings.get("entrypoint") or "app.py"))
