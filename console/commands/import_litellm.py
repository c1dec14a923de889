"""`penstock import litellm-config`: a penstock.toml made of the config.yaml of LiteLLM's proxy.

Deployments become upstreams, model names routes, fallbacks further upstreams of a route, budgets budgets. Keys stay in
the environment: a variable that the YAML names is named, a key that stands in it is not copied. All else is listed, in
the file as comments and on stderr, by its place and never by its value, which may be a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from json import dumps
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from penstock.console.commands.import_rollouts import Fields, as_list, as_object
from penstock.gateway.client.console import CommandError, note, unreadable, whole_file
from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.settings import ADMIN_KEY, http_url

MOST_BYTES: Final = 4 << 20
MOST_ALIASES: Final = 1_000
"""Most references (`*name`) in one YAML file: a few of them can stand for a billion values."""
DEEPEST: Final = 50
"""Most levels of lists and mappings in it."""
MOST_PLACES: Final = 4
"""Most places that are named of one note."""
VARIABLE: Final = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
OPENAI: Final = "openai"


class Provider(NamedTuple):
    """The settings of an upstream for a provider of LiteLLM."""

    dialect: str
    base_url: str | None = None
    """Its public address; None: the YAML must name one."""
    key: str | None = None
    """Variable in which LiteLLM itself looks for the key."""
    auth: str | None = None
    """The cloud whose credentials are used in place of a key."""
    path: str = ""
    """What follows a base URL of the YAML that has no path."""


PROVIDERS: Final = {
    "openai": Provider(OPENAI, "https://api.openai.com/v1", "OPENAI_API_KEY"),
    "text-completion-openai": Provider(OPENAI, "https://api.openai.com/v1", "OPENAI_API_KEY"),
    "anthropic": Provider("anthropic", "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    "gemini": Provider("gemini", "https://generativelanguage.googleapis.com", "GEMINI_API_KEY"),
    # Its v1 API, which OpenAI's own clients speak: those of LiteLLM go on as they are.
    "azure": Provider(OPENAI, None, "AZURE_API_KEY", path="/openai/v1"),
    "bedrock": Provider("bedrock", auth="aws"),
    "vertex_ai": Provider("vertex", auth="google"),
    "hosted_vllm": Provider(OPENAI),
    "openai_like": Provider(OPENAI),
    "lm_studio": Provider(OPENAI),
    "groq": Provider(OPENAI, "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "deepseek": Provider(OPENAI, "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "mistral": Provider(OPENAI, "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "xai": Provider(OPENAI, "https://api.x.ai/v1", "XAI_API_KEY"),
    "together_ai": Provider(OPENAI, "https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "fireworks_ai": Provider(OPENAI, "https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
    "openrouter": Provider(OPENAI, "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
}
"""By the first part of `litellm_params.model`."""
BY_NAME: Final = (
    (re.compile(r"(gpt-|o[134](-|$)|chatgpt-|text-embedding-)"), "openai"),
    (re.compile("claude-"), "anthropic"),
)
"""Providers of model names without such a part, as LiteLLM's own list has them."""
HINTS: Final = {
    "master_key": f"the gateway's own key is {ADMIN_KEY}; keys for calls are made by `penstock key`",
    "database_url": "nothing needs a database: the tape is a directory",
    "callbacks": "the tape has every call; `[otlp]` sends spans on, /metrics is always there",
    "success_callback": "the tape has every call; `[otlp]` sends spans on",
    "failure_callback": "the tape has every call; `[[webhook]]` tells others",
    "mcp_servers": "servers of tools stand below `[mcp.servers]`: see docs/mcp.md",
    "guardrails": "rules for tools stand in `[[policy]]`, what is kept off the tape in `[[masking]]`",
    "rpm": 'in LiteLLM it is a weight; `[[budget]]` with unit = "calls" and window = "1m" limits a model',
    "tpm": 'in LiteLLM it is a weight; `[[budget]]` with unit = "tokens" and window = "1m" limits a model',
    "timeout": "`read_timeout` is the nearest: seconds without a byte, not of a whole call",
    "request_timeout": "`read_timeout` is the nearest: seconds without a byte, not of a whole call",
    "stream_timeout": "`read_timeout` is the nearest: seconds without a byte",
    "num_retries": "retries are the client's; where a route has several upstreams the next one is asked",
    "context_window_fallbacks": "`context` of the upstreams of one route says which takes longer prompts",
    "content_policy_fallbacks": "a refused prompt is answered as it is",
    "include": "other files are not read: import each, or put them into one",
    "environment_variables": "set them in the gateway's environment",
    "cache": "answers are never cached",
    "provider_budget_config": "a budget counts by model, not by provider",
    "input_cost_per_token": "prices stand in the file of `prices`: see `penstock prices`",
    "output_cost_per_token": "prices stand in the file of `prices`: see `penstock prices`",
    "routing_strategy": "upstreams share calls by their shares, and rest while they fail",
}
"""What there is in place of settings that have no counterpart."""
READ: Final = frozenset(
    {"model", "api_key", "api_base", "base_url", "max_parallel_requests", "weight", "aws_region_name", "api_version"}
    | {"vertex_location", "max_budget", "budget_duration"}
)
"""Keys of `litellm_params` that are read."""
TOO_LARGE: Final = "the YAML is larger than any configuration"


@dataclass(slots=True)
class Upstream:
    """An `[[upstream]]` of the file that is made."""

    name: str
    dialect: str
    base_url: str
    key_env: str | None
    auth: str | None
    max_concurrent: int | None
    models: set[str] = field(default_factory=set[str])
    """Model names of which a route has it."""


@dataclass(slots=True)
class Route:
    """A `[[route]]`: shares and names of the model by upstream."""

    model: str
    shares: dict[str, float] = field(default_factory=dict[str, float])
    alias: dict[str, str] = field(default_factory=dict[str, str])


def litellm_config(file: Path, /, *, output: Path | None = None) -> None:
    """Make a penstock.toml of the config.yaml of LiteLLM's proxy.

    What has no counterpart is listed, in the file and on stderr. No key is copied: variables are named.

    Parameters
    ----------
    file
        The config.yaml.
    output
        File to write, such as penstock.toml; stdout if not given. One that is there is not overwritten.
    """
    if output is not None and output.exists():
        raise CommandError(f"{output} is there already: name another file, or move it away")
    made = convert(yaml_of(file), os.environ)
    content = made.toml(file.name)
    made.check(content)
    with whole_file(output) as target:
        target.write(content.encode())
    for line in made.notes:
        note(line)
    note(
        f"upstreams: {len(made.upstreams)}, routes: {len(made.routes)}, budgets: {len(made.budgets)}, "
        f"to look at: {len(made.notes)}"
    )


def yaml_of(file: Path) -> Fields:
    """The mapping in a YAML file, by the safe loader and with bounds. Raises `CommandError`."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise CommandError(f"YAML needs PyYAML: {install_hint('yaml')}") from None
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as e:
        raise CommandError(unreadable(file, e)) from None
    if len(content) > MOST_BYTES:
        raise CommandError(f"{file}: {TOO_LARGE}")
    try:
        if (why := _excess(yaml, content)) is not None:
            raise CommandError(f"{file}: it has more than {why}")
        found = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f":{mark.line + 1}"
        # The message leaves the text out: it may be a key.
        raise CommandError(
            f"{file}{place} is not YAML: {getattr(error, 'problem', None) or 'it cannot be read'}"
        ) from None
    except (RecursionError, ValueError):
        raise CommandError(
            f"{file} is not YAML that can be read: it is nested too deeply, or has an impossible value"
        ) from None
    if not isinstance(found, dict):
        raise CommandError(f"{file} is no configuration of LiteLLM's proxy: it has no keys such as model_list")
    return cast(Fields, found)


def _excess(yaml: Any, content: bytes) -> str | None:
    """The bound that a YAML file breaks; the loader would need much time or memory."""
    depth = aliases = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return f"{DEEPEST} levels"
        if aliases > MOST_ALIASES:
            return f"{MOST_ALIASES} references"
    return None


def convert(config: Fields, environment: Mapping[str, str]) -> Conversion:
    """The settings that a configuration stands for. `environment`: where addresses are found that it names by
    variables. Raises nothing: what is not understood is noted."""
    made = Conversion(environment)
    listed = config.get("model_list")
    if as_list(listed) is None:
        made.note("model_list", "it is missing or no list: there are no models")
    for at, one in enumerate(as_list(listed) or []):
        with made.reading(f"model_list[{at}]"):
            made.add_deployment(as_object(one), f"model_list[{at}]")
    sections = {name: as_object(config.get(name)) for name in ("litellm_settings", "router_settings")}
    for name, section in sections.items():
        made.add_fallbacks(section, name)
    aliases = as_object(sections["router_settings"].get("model_group_alias"))
    for alias, model in aliases.items():
        made.add_alias(str(alias), model)
    made.add_budget("litellm_settings", sections["litellm_settings"], "litellm", None)
    for name, section in sections.items():
        made.note_others(
            name, section, ("fallbacks", "default_fallbacks", "model_group_alias", "max_budget", "budget_duration")
        )
    made.note_secrets("general_settings", as_object(config.get("general_settings")))
    made.note_others("environment_variables", as_object(config.get("environment_variables")), ())
    known = ("model_list", "litellm_settings", "router_settings", "general_settings", "environment_variables")
    made.note_others("", config, known)
    return made


class _SkippedError(Exception):
    """A deployment, or a part of one, that has no counterpart; the message says why."""


class Conversion:
    """The upstreams, routes and budgets of a configuration, and notes on what else it has."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.upstreams: list[Upstream] = []
        self.routes: dict[str, Route] = {}
        self.budgets: list[dict[str, Any]] = []
        self._notes: dict[str, list[str]] = {}
        """Places, by what is to be said of them."""
        self._environment = environment
        self._literal_keys: dict[str, str] = {}
        """Variables for keys that stand in the YAML, by the key."""

    def note(self, place: str, why: str) -> None:
        """Note something that a person must look at."""
        self._notes.setdefault(why, []).append(place)

    @property
    def notes(self) -> list[str]:
        """The notes, each with its places."""
        return [f"{_listed(places)}: {why}" for why, places in self._notes.items()]

    @contextmanager
    def reading(self, place: str) -> Generator[None]:
        """Leave out what has no counterpart."""
        try:
            yield
        except _SkippedError as error:
            self.note(place, str(error))

    def note_others(self, place: str, section: Fields, known: tuple[str, ...]) -> None:
        """Note the keys of a section that are not read, each with what there is in its place."""
        for name in section:
            if name not in known:
                name = str(name)
                self.note(f"{place}.{name}".lstrip("."), HINTS.get(name, HINTS.get(place, "it has no counterpart")))

    def note_secrets(self, place: str, section: Fields) -> None:
        """Note the keys of a section whose values may be secrets."""
        for name, value in section.items():
            named = VARIABLE.fullmatch(value) if isinstance(value, str) else None
            how = f"the YAML names the variable {named[1]}" if named else "its value is not copied"
            self.note(f"{place}.{name}", f"{HINTS.get(str(name), 'it has no counterpart')} ({how})")

    # Deployments ------------------------------------------------------------------------------------------------------

    def add_deployment(self, deployment: Fields, place: str) -> None:
        """An item of `model_list`: an upstream, and its place in the route of its name."""
        given = as_object(deployment.get("litellm_params"))
        model_name, model = deployment.get("model_name"), given.get("model")
        if not isinstance(model_name, str) or not isinstance(model, str) or not model_name or not model:
            raise _SkippedError("model_name and litellm_params.model must be texts")
        named, served = self._provider(model, given)
        if ("*" in model_name or "*" in served) and model_name != served:
            raise _SkippedError(
                "a pattern for other names cannot be rewritten: clients name the model as the provider does, and a "
                f"route with model = {_toml(served)} leads it there"
            )
        found = self._upstream(named, model_name, given, f"{place}.litellm_params")
        route = self.routes.setdefault(model_name, Route(model_name))
        route.shares[found.name] = self._positive(given.get("weight"), f"{place}.litellm_params.weight") or 1.0
        if served != model_name:
            route.alias[found.name] = served
        if found.dialect not in (OPENAI, "gemini"):
            why = f"its clients must speak the API of {found.dialect}: chat completions are not translated to it"
            self.note(f"{place} ({model_name})", why)
        self.note_others(f"{place}.litellm_params", given, tuple(READ))
        self.note_others(f"{place}.model_info", as_object(deployment.get("model_info")), ("id", "mode", "base_model"))
        self.note_others(place, deployment, ("model_name", "litellm_params", "model_info"))
        self.add_budget(f"{place}.litellm_params", given, model_name, model_name)

    def _provider(self, model: str, given: Fields) -> tuple[str, str]:
        """(provider of LiteLLM, name of the model there)."""
        named, slash, rest = model.partition("/")
        own = given.get("custom_llm_provider")
        if isinstance(own, str) and own in PROVIDERS:
            return own, rest if named == own else model
        if slash and named in PROVIDERS:
            for part in ("converse/", "invoke/") if named == "bedrock" else ():
                rest = rest.removeprefix(part)
            return named, rest
        if not slash and (found := next((name for known, name in BY_NAME if known.match(model)), None)):
            return found, model
        raise _SkippedError(
            f"litellm_params.model: the provider {named!r} has no counterpart; one that speaks OpenAI's API can be an "
            "`[[upstream]]`"
            if slash
            else "litellm_params.model: it does not name its provider, as in openai/NAME"
        )

    def _upstream(self, named: str, model_name: str, given: Fields, place: str) -> Upstream:
        """The upstream of a deployment. Two of one route are two, even if they are the same server."""
        how = PROVIDERS[named]
        base_url = self._base_url(named, how, given)
        key_env = None if how.auth else self._key_env(named, how, given, f"{place}.api_key")
        most = self._positive(given.get("max_parallel_requests"), f"{place}.max_parallel_requests")
        if key_env is None and how.auth is None:
            self.note(
                place, "it has no key: that of the client passes to it, unless `key_env` names one, if need be made up"
            )
        wanted = (how.dialect, base_url, key_env, how.auth, None if most is None else max(1, int(most)))
        for one in self.upstreams:
            same = (one.dialect, one.base_url, one.key_env, one.auth, one.max_concurrent) == wanted
            if same and model_name not in one.models:
                one.models.add(model_name)
                return one
        names = {one.name for one in self.upstreams}
        # The names of providers are those of public endpoints, which must speak their own dialect.
        first = named.replace("_", "-")
        free = (first if at == 1 else f"{first}-{at}" for at in range(1, len(names) + 2))
        made = Upstream(next(name for name in free if name not in names), *wanted)
        made.models.add(model_name)
        self.upstreams.append(made)
        return made

    def _base_url(self, named: str, how: Provider, given: Fields) -> str:
        value = given.get("api_base") or given.get("base_url")
        if isinstance(value, str) and (variable := VARIABLE.fullmatch(value)):
            value = self._environment.get(variable[1])
            if not value:
                raise _SkippedError(
                    f"api_base is in the variable {variable[1]}, which is not set: set it and import again"
                )
        if value is None and named == "bedrock" and isinstance(region := given.get("aws_region_name"), str):
            value = f"https://bedrock-runtime.{region}.amazonaws.com"
        if value is None and named == "vertex_ai" and isinstance(place := given.get("vertex_location"), str):
            value = (
                "https://aiplatform.googleapis.com"
                if place == "global"
                else f"https://{place}-aiplatform.googleapis.com"
            )
        if value is None:
            value = how.base_url
        if not isinstance(value, str):
            where = {"bedrock": "aws_region_name", "vertex_ai": "vertex_location"}.get(named, "api_base")
            raise _SkippedError(f"litellm_params.{where} is missing: the address of {named} is not known without it")
        try:
            url = http_url(value.strip(), "key_env")
        except ValueError as error:
            raise _SkippedError(f"litellm_params.api_base: {error}") from None
        return url if not how.path or urlsplit(url).path else url + how.path

    def _key_env(self, named: str, how: Provider, given: Fields, place: str) -> str | None:
        value = given.get("api_key")
        if value is None:
            return how.key
        if isinstance(value, str) and (variable := VARIABLE.fullmatch(value)):
            return variable[1]
        if not isinstance(value, str):
            self.note(place, "it is no text")
            return how.key
        key, first = value, how.key or f"{named.upper().replace('-', '_')}_API_KEY"
        found = self._literal_keys.get(key)
        if found is None:
            free = (first if at == 1 else f"{first}_{at}" for at in range(1, len(self._literal_keys) + 2))
            found = next(name for name in free if name not in self._literal_keys.values())
            self._literal_keys[key] = found
        self.note(place, f"the key stands in the YAML and is not copied: put it into the variable {found}")
        return found

    def _positive(self, value: Any, place: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            self.note(place, "it is no number above 0")
            return None
        return float(value)

    # Fallbacks, aliases, budgets --------------------------------------------------------------------------------------

    def add_fallbacks(self, section: Fields, place: str) -> None:
        """Further upstreams of routes, asked when the others do not answer."""
        own = dict[str, list[Any]]()
        for one in as_list(section.get("fallbacks")) or []:
            own |= {str(model): as_list(others) or [] for model, others in as_object(one).items()}
        default = as_list(section.get("default_fallbacks")) or []
        before = {name: Route(name, dict(one.shares), dict(one.alias)) for name, one in self.routes.items()}
        for model, others in own.items():
            if model not in before:
                self.note(f"{place}.fallbacks", f"{model!r} is none of the models")
            self._fall_back(model, others, before, f"{place}.fallbacks")
        for model in before.keys() - own.keys() if default else ():
            self._fall_back(model, [one for one in default if one != model], before, f"{place}.default_fallbacks")

    def _fall_back(self, model: str, others: list[Any], before: Mapping[str, Route], place: str) -> None:
        dialects = {one.name: one.dialect for one in self.upstreams}
        for other in others:
            if model not in before:
                return
            if not isinstance(other, str) or other not in before:
                self.note(place, f"a fallback of {model!r} is none of the models")
                continue
            route, spare = self.routes[model], before[other]
            for name in spare.shares:
                if name in route.shares:
                    self.note(place, f"{model!r} and {other!r} have the upstream {name}: a route has it once")
                elif dialects[name] not in {dialects[one] for one in route.shares}:
                    self.note(
                        place,
                        f"{other!r} speaks another API than {model!r}: a route does not lead from one to the other",
                    )
                else:
                    route.shares[name] = 0.0
                    if (served := spare.alias.get(name, other)) != model:
                        route.alias[name] = served

    def add_alias(self, alias: str, model: Any) -> None:
        """One more name of a model."""
        name = as_object(model).get("model", model)
        found = self.routes.get(name) if isinstance(name, str) else None
        if found is None or alias in self.routes:
            self.note(f"router_settings.model_group_alias.{alias}", "it is no other name of one of the models")
            return
        served = {one: found.alias.get(one, found.model) for one in found.shares}
        self.routes[alias] = Route(
            alias, dict(found.shares), {one: name for one, name in served.items() if name != alias}
        )

    def add_budget(self, place: str, section: Fields, name: str, model: str | None) -> None:
        """A budget in US dollars, of one model or of all calls."""
        if section.get("max_budget") is None:
            return
        limit, window = self._positive(section["max_budget"], f"{place}.max_budget"), section.get("budget_duration")
        found = _window(window)
        if limit is None:
            return
        if found is None:
            self.note(f"{place}.budget_duration", "it is no time such as 30d or 1mo: the budget is left out")
            return
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:50]
        taken = {one["name"] for one in self.budgets}
        made: dict[str, Any] = {"name": slug if slug not in taken else f"{slug}-{len(taken) + 1}"}
        made |= {} if model is None else {"model": model}
        self.budgets.append(made | {"unit": "usd", "limit": limit, "window": found})
        if model is not None and model in self.routes and len(self.routes[model].shares) > 1:
            self.note(f"{place}.max_budget", f"it is that of a deployment; the budget counts all calls of {model!r}")

    def check(self, content: str) -> None:
        """Note what the gateway would say of the file."""
        from tomllib import TOMLDecodeError, loads

        from penstock.gateway.config import GatewayConfig
        from penstock.gateway.model.toml import ConfigError, validated

        try:
            _ = validated(GatewayConfig, loads(content), "what was made")
        except (ConfigError, TOMLDecodeError) as error:
            self.note("penstock serve", f"it will refuse this: {error}")

    # Out --------------------------------------------------------------------------------------------------------------

    def toml(self, source: str) -> str:
        """The file, with the notes as comments."""
        lines = [f"# Made of {_printable(source)} by `penstock import litellm-config`. `penstock serve` checks it."]
        if self.notes:
            lines += ["#", "# To look at:", *(f"# * {_printable(line)}" for line in self.notes)]
        if variables := sorted({one.key_env for one in self.upstreams if one.key_env}):
            lines += ["#", f"# Keys come from the environment: {', '.join(variables)}"]
        for one in self.upstreams:
            given: dict[str, Any] = {"name": one.name, "base_url": one.base_url, "dialect": one.dialect}
            more = {"key_env": one.key_env, "auth": one.auth, "max_concurrent": one.max_concurrent}
            lines += _table("upstream", given | {name: value for name, value in more.items() if value is not None})
        for route in self.routes.values():
            names = list(route.shares)
            upstream = names[0] if len(names) == 1 else route.shares
            lines += _table(
                "route", {"model": route.model, "upstream": upstream} | ({"alias": route.alias} if route.alias else {})
            )
        for budget in self.budgets:
            lines += _table("budget", budget)
        return "\n".join([*lines, ""])


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")


def _window(value: Any) -> str | None:
    """A budget's window; None if it is none. Without a duration LiteLLM never begins anew."""
    if value is None:
        return "total"
    found = re.fullmatch(r"([1-9][0-9]{0,5})(s|m|h|d|mo)", value) if isinstance(value, str) else None
    if found is None or (found[2] == "mo" and found[1] != "1"):
        return None
    return "month" if found[2] == "mo" else found[0]


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    return ["", f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in values.items())]


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(one)}' for key, one in cast(Fields, value).items())} }}"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else repr(value)
    # JSON writes text as TOML does, but for this character.
    return dumps(value).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
