"""Translation of a recipe's NeMo Gym agents, their reward components and their rows, from the files of a Gym checkout.

A recipe lists its servers by ``env.nemo_gym.config_paths``, which are files of NeMo Gym. The names of agents and reward
components are therefore only known with a checkout. NeMo Gym's code is parsed, never imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import yaml

from gdpo_nemo.config.rollout_checks import TURNS_KEPT
from gdpo_nemo.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.interop.translation import Findings
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import parse_json, parse_yaml, read_text, real_path

NAME = "nemo_gym"
"""Name of the environment in the translated config, which is also NeMo-RL's name."""
SUBMODULE = "3rdparty/Gym-workspace/Gym"
"""Folder of NeMo Gym in a checkout of NeMo-RL. Recipes use it in the paths of their rows."""
_SECTION = "env.nemo_gym."
_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
_OF_NEMO_RL = ("port_range_low", "port_range_high", "is_trajectory_collection", "num_gpu_nodes", "effort_levels",
               "pad_dynamic_image_shapes", "thinking_tags", "invalid_tool_call_patterns")  # fmt: skip
"""Keys of ``env.nemo_gym`` that NeMo-RL reads and that do not describe servers."""
_THINKING = "policy_model.responses_api_models.vllm_model.extra_body.chat_template_kwargs"
_COMPONENTS = "reward_components"
_FIRST_PORT = 5000
_SHORTEST_TURN = 16
"""Number of tokens that a turn with its template has at least."""


class Unknown(Exception):
    """The recipe's agents or reward components cannot be determined. The text is the reason."""


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
    agents = {
        name: settings
        for name, (kind, _, settings) in instances.items()
        if kind == "responses_api_agents" and "entrypoint" in settings  # otherwise only changes to a server
    }
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


# -- files of the checkout --------------------------------------------------------------------------------------


def _instances(recipe: Recipe, checkout: Path) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Return (kind, implementation, settings) by instance name, from ``config_paths`` and the recipe itself."""
    paths = recipe.get(f"{_SECTION}config_paths") or []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise Unknown("config_paths must be a list of files")
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for content in (*_contents(paths, checkout, set()), _settings(recipe)):
        for name, section in content.items():
            for kind in _KINDS:
                servers = section.get(kind) if isinstance(section, dict) else None
                for implementation, settings in servers.items() if isinstance(servers, dict) else ():
                    before = found[name][2] if name in found and found[name][1] == implementation else {}
                    found[name] = (kind, implementation, {**before, **(settings or {})})
    return found


def _contents(paths: list[str], checkout: Path, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the files of ``config_paths``. Files that a file includes precede that file, which overrides them."""
    for path in paths:
        if path in seen:
            continue
        seen.add(path)
        file = checkout / path
        if not file.is_file():
            raise Unknown(f"{path} was not found in {checkout}")
        try:
            content = parse_yaml(read_text(file))
        except yaml.YAMLError as error:
            raise ConfigError(f"--gym-checkout: {file} is not valid YAML: {str(error).splitlines()[0]}") from None
        if isinstance(content, dict):
            included = content.get("config_paths") or []
            yield from _contents([one for one in included if isinstance(one, str)], checkout, seen)
            yield content


def _servers_of(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    servers = []
    for agent, settings in agents.items():
        reference = settings.get("resources_server")
        name = reference.get("name") if isinstance(reference, dict) else None
        if not isinstance(name, str):
            raise Unknown(f"the agent {agent} does not name a resources server")
        servers.append(name)
    return list(dict.fromkeys(servers))


def _names_of_server(instances: Mapping[str, tuple[str, str, dict[str, Any]]], name: str, checkout: Path) -> set[str]:
    """Return the components of a server, from its code and its recorded replies (empty for a single reward)."""
    if name not in instances or instances[name][0] != "resources_servers":
        raise Unknown(f"no file in config_paths defines the resources server {name}")
    _, implementation, settings = instances[name]
    folder = checkout / "resources_servers" / implementation
    code = folder / str(settings.get("entrypoint") or "app.py")
    if not code.is_file():
        raise Unknown(f"{code} was not found")
    written = _names_in_code(read_text(code))
    recorded = _recorded_names(folder / "data" / "example_rollouts.jsonl")
    if written is None and not recorded:
        raise Unknown(f"{code} computes the names of its reward components, and no recorded reply contains them")
    if written and recorded and written != recorded:
        raise Unknown(
            f"the reward components of {name} are {', '.join(sorted(written))} in {code.name}, but "
            f"{', '.join(sorted(recorded))} in its recorded replies"
        )
    return written or recorded


def _names_in_code(text: str) -> set[str] | None:
    """Return the keys of all dictionaries that a server assigns to ``reward_components`` (None if it computes them)."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    names: set[str] = set()
    for value in (value for node in nodes for value in _assigned(node)):
        if isinstance(value, ast.Name) and value.id == _COMPONENTS:
            continue
        keys: Sequence[ast.expr | None] = value.keys if isinstance(value, ast.Dict) else [None]
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
            return None
        names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return names


def _assigned(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the values that a node assigns to the name, attribute, argument or key ``reward_components``.

    A value that is assigned to a single component of the dictionary is returned as a dictionary.
    """
    if isinstance(node, ast.keyword) and node.arg == _COMPONENTS:
        yield node.value
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_components(target.value):
                yield ast.Dict([target.slice], [node.value])
            elif _is_components(target):
                yield node.value
    if isinstance(node, ast.Dict):
        yield from (v for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == _COMPONENTS)


def _is_components(target: object) -> bool:
    return getattr(target, "id", getattr(target, "attr", None)) == _COMPONENTS


def _recorded_names(file: Path) -> set[str]:
    """Return the components in the replies that a server's folder records (empty if there are none)."""
    names: set[str] = set()
    for line in read_text(file).splitlines() if file.is_file() else ():
        try:
            reply = parse_json(line)
        except ValueError:
            return set()
        components = reply.get(_COMPONENTS) if isinstance(reply, dict) else None
        names |= set(components) if isinstance(components, dict) else set()
    return names
