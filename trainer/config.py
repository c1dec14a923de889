"""`train.toml`: one strict tree. An unknown key is an error that names its path and the nearest right key.

Free of torch and numpy, so that a wrong configuration is refused in a moment. Every field's docstring is its
documentation, and a test compares docs/training-settings.md with this file. The defaults have learnt on rollouts of
real agents: groups centred and not scaled, clip-higher, truncated importance sampling at 2.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.gateway.model.toml import ConfigError, Section, read, validated

# `[evaluate]` of `train.toml`: held-out tasks.


class SuiteSettings(Section):
    """`[[evaluate.suite]]`: tasks that are never trained on, and are reported together."""

    tasks: Path = Field(strict=False)
    """JSONL file of tasks, one rollout input a line. Its name without ending names the metrics:
    `evaluation/NAME/reward`."""
    samples: int = Field(default=1, ge=1, le=1000)
    """Rollouts of each task."""
    passed: float = Field(default=1.0, allow_inf_nan=False)
    """Least reward that counts as passed, for `pass@k`."""

    @field_validator("tasks")
    @classmethod
    def _names_figures(cls, value: Path) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", value.stem):
            raise ValueError(
                f"figures are called {value.stem!r} then: name the file with 1 to 32 letters, digits, _ and -"
            )
        return value

    @property
    def name(self) -> str:
        """The name of the suite in figures."""
        return self.tasks.stem


class EvaluateSettings(Section):
    """`[evaluate]`: held-out tasks, and how often the weights are evaluated on them."""

    every: int = Field(default=10, ge=1)
    """Steps between evaluations; the last step is always evaluated."""
    suite: list[SuiteSettings] = Field(default=[])
    """Suites of tasks; the first one's reward says which weights are the best. Default: none."""

    @field_validator("suite")
    @classmethod
    def _names_differ(cls, value: list[SuiteSettings]) -> list[SuiteSettings]:
        names = [suite.name for suite in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two suites are called {name!r}; give each file a name of its own")
        return value


Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]
Credit = Literal["rollout", "turn"]
Surrogate = Literal["ppo", "gspo", "cispo", "pg"]
Aggregate = Literal["rollout-mean", "token-mean"] | Annotated[int, Field(ge=1)]
Correction = Literal["token", "sequence", "icepop", "none"]

CLIPS: dict[Surrogate, tuple[float, float]] = {
    "ppo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "pg": (1.0, 0.0),
}
"""How far a ratio may fall below 1 and rise above: DAPO, GSPO and ScaleRL; `pg` has no ratio."""
MAX_NORM = 1.0
"""Norm that gradients are clipped to."""


class RunSettings(Section):
    """`[run]`: what this run is called and how long it goes on."""

    name: str = Field(default="policy", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run on the tape."""
    directory: Path = Field(default=Path("penstock-run"), strict=False)
    """Directory of checkpoints and versions, which servers read. A run that finds its checkpoint there resumes."""
    steps: int = Field(default=100, ge=1)
    """Steps in all, resumed ones included; sft and dpo count epochs instead."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the initial adapter and the order of tasks."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the newest two are kept."""


class ModelSettings(Section):
    """`[model]`: what is trained. `path` is required."""

    path: Path = Field(strict=False)
    """Directory of the model in transformers' format; nothing is fetched from a hub."""
    name: str = Field(default="policy", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Model name that agents send, and the resource whose versions are trained."""
    weights: Literal["lora", "full"] = "lora"
    """What is trained: a LoRA adapter, or all weights."""
    adapter: Path | None = Field(default=None, strict=False)
    """Directory of the initial PEFT adapter (lora only). Default: a new one, which changes nothing yet."""
    rank: int = Field(default=16, ge=1, le=512)
    """Rank of a new adapter; its output is scaled by 2 at every rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Modules that a new adapter changes."""

    @model_validator(mode="after")
    def _an_adapter_is_lora(self) -> Self:
        if self.adapter is not None and self.weights == "full":
            raise ValueError('adapter: it goes with weights = "lora"; merge it into the model to train all weights')
        return self


class RolloutSettings(Section):
    """`[rollouts]`: what is collected for one step."""

    tasks: Path | None = Field(default=None, strict=False)
    """JSONL file of tasks, one rollout input a line. `train grpo` needs it, except with `--online`."""
    groups: int = Field(default=16, ge=1)
    """Groups (tasks) in one step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task."""
    dynamic: float = Field(default=1.0, ge=1, le=10)
    """Most tasks of a step, as a multiple of `groups`: more are run until enough groups differ in reward."""
    curriculum: bool = False
    """Whether tasks whose rewards vary are run more often. Default: all tasks in turn."""
    ahead: bool = False
    """Whether the next step's rollouts are queued before the update, so that agents run during it."""
    run: list[str] = Field(default=[])
    """Arguments of a `penstock run` that is started along. Default: none, runners run elsewhere."""
    staleness: int = Field(default=4, ge=0)
    """Versions that a sample's first token may be behind the newest; older groups are dropped whole."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that an attempt may take. A step goes on a tenth later, without unfinished rollouts."""
    failed_reward: Annotated[float, Field(allow_inf_nan=False)] | Literal["drop"] = 0.0
    """Reward of a rollout that fails or is late and has none; `drop` leaves it out of its group."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the rollouts; the trainer's log-probabilities use the same."""


class AdvantageSettings(Section):
    """`[advantage]`: how rewards become credit."""

    estimator: Estimator = "dr_grpo"
    """Baseline: `dr_grpo` (group mean), `grpo` (also divided by the deviation), `rloo` (mean of the others),
    `reinforce++` (batch)."""
    credit: Credit = "rollout"
    """`rollout` gives all tokens the rollout's reward; `turn` gives a call's tokens the return of that call."""
    overlong: Literal["keep", "mask"] | Annotated[tuple[int, int], Field(strict=False)] = "keep"
    """Rollouts with a truncated answer: kept, masked (no loss, but part of the group's baseline), or penalised: with
    [3072, 4096] an answer loses reward from 3072 tokens on, and 1 at 4096."""

    @field_validator("overlong")
    @classmethod
    def _bounds_rise(cls, value: str | tuple[int, int]) -> str | tuple[int, int]:
        if isinstance(value, tuple) and not 0 <= value[0] < value[1]:
            raise ValueError(f"{list(value)} do not rise from 0 or more, such as [3072, 4096]")
        return value


class LossSettings(Section):
    """`[loss]`: the function that a step minimises."""

    kind: Surrogate = "ppo"
    """`ppo` (clipped), `gspo` (clipped by sequence), `cispo` (clipped weights) or `pg` (plain policy gradient)."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference: the model without adapter, or as it was at the start (full)."""
    correction: Correction | None = None
    """Importance sampling between engine and trainer: `token` or `sequence` (truncated), `icepop` (masked), `none`.
    Default: `token`; for gspo `sequence`, and there `token` and `icepop` are refused."""
    aggregate: Aggregate = "rollout-mean"
    """Average of the tokens' losses: mean of the rollouts' means, mean over all tokens (DAPO), or each rollout's sum
    divided by a number, such as 1024 (Dr. GRPO)."""

    @model_validator(mode="after")
    def _gspo_goes_by_sequences(self) -> Self:
        if self.kind == "gspo" and self.correction in ("token", "icepop"):
            raise ValueError(
                f'correction: "{self.correction}" weighs tokens, and in kind = "gspo" all tokens of a call have one '
                'ratio; use "sequence" or "none"'
            )
        return self

    @property
    def effective_correction(self) -> Correction:
        """The correction in effect between engine and trainer."""
        return self.correction or ("sequence" if self.kind == "gspo" else "token")


class OptimiserSettings(Section):
    """`[optimiser]`: settings of AdamW and of its learning rate."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate after the warm-up. Default: 1e-4 for LoRA, 1e-6 for all weights."""
    warmup: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0 (warm-up)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step."""
    updates: int = Field(default=1, ge=1)
    """Optimiser updates in one step, on even parts of its rollouts. Ratios are against the policy at the step's
    start."""


class EngineSettings(Section):
    """`[engine]`: the machinery that computes log-probabilities and updates."""

    kind: Literal["local", "verl"] = "local"
    """`local`: torch in this process. `verl`: verl's workers on Ray, on several GPUs and machines."""
    ranks: int = Field(default=1, ge=1)
    """Processes that share the model, one on each GPU (verl only)."""
    nodes: int = Field(default=1, ge=1)
    """Machines; each has as many ranks (verl only)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the computation. Trained weights and optimiser stay in float32."""
    layout: Literal["packed", "padded"] = "packed"
    """Whether short samples share a row (`packed`) or have one each."""
    batch_tokens: int = Field(default=16_384, ge=2)
    """Tokens in one forward pass, as memory allows. Longer samples are left out and reported, never cut."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes activations again, to save memory."""

    @model_validator(mode="after")
    def _ranks_have_their_place(self) -> Self:
        if self.kind == "local" and self.ranks * self.nodes > 1:
            raise ValueError('ranks: several ranks or nodes need kind = "verl"')
        if self.ranks % self.nodes:
            raise ValueError(f"ranks: {self.ranks} are not as many on each of {self.nodes} nodes")
        return self


class DataSettings(Section):
    """`[data]`: what `train sft` and `train dpo` learn from; read once, when the run begins."""

    rollouts: str | None = None
    """Filter of recorded rollouts. Default: `mode:train status:succeeded,ended` (sft), `mode:train status:over`
    (dpo)."""
    file: Path | None = Field(default=None, strict=False)
    """JSONL file of chats or preferences as `penstock samples` writes them, instead of the tape."""
    model: str | None = None
    """Calls of this model only. Default: the model of most calls of a rollout."""
    agent: str | None = None
    """Calls of this agent only. Default: all."""
    rewards: dict[str, float] = Field(default={})
    """Weights of the reward's dimensions, whose sum is used. Default: the reward's value."""
    allow: list[str] = Field(default=[])
    """Reasons of `penstock doctor` that do not keep a call out."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that is evaluated instead of trained on."""
    batch: int = Field(default=16, ge=1)
    """Rollouts (sft) or pairs (dpo) in one optimiser step."""
    epochs: int = Field(default=1, ge=1)
    """Times that each rollout or pair is seen."""

    @field_validator("allow")
    @classmethod
    def _reasons(cls, value: list[str]) -> list[str]:
        from penstock.adapters.selection import REASONS

        for word in value:
            if word not in REASONS:
                raise ValueError(f"{word!r} is no reason; there are {', '.join(sorted(REASONS))}")
        return value


class SftSettings(Section):
    """`[sft]`: supervised fine-tuning on chats."""

    reward: float | None = None
    """Least reward of a rollout. Default: all rollouts, with or without reward."""
    best: int | None = Field(default=None, ge=1)
    """Most rollouts of a group, those with the highest rewards. Default: all."""


class DpoSettings(Section):
    """`[dpo]`: direct preference optimisation on pairs."""

    pairs: Literal["best", "all"] = "best"
    """Pairs of a group: its best and worst rollout, or every two."""
    margin: float = Field(default=0.0, ge=0)
    """Least difference of a pair's rewards; equal rewards make no pair."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the reference; with less the policy moves further."""


class InferenceSettings(Section):
    """`[inference]`: the vLLM that agents' calls go to."""

    urls: list[str] = Field(default=[])
    """Base URLs, with `/v1`, of running servers. Default: none, one is started."""
    python: Path | None = Field(default=None, strict=False)
    """Python of the environment that has vLLM, for a server that is started."""
    port: int = Field(default=8000, ge=1, le=65534)
    """Port of a server that is started. The second one, for `model.weights = "full"`, has the next port."""
    flags: list[str] = Field(default=[])
    """More flags for a server that is started."""
    upstream: str = Field(default="vllm", pattern=r"^[A-Za-z0-9._-]{1,62}$")
    """Name of the server's `[[upstream]]` in the gateway; with `-2` that of the second server."""
    base: str = Field(default="base", pattern=r"^[!-~]{1,256}$")
    """Name of the base model at the server."""

    @field_validator("urls")
    @classmethod
    def _http(cls, value: list[str]) -> list[str]:
        for url in value:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"{url!r} is not an http:// or https:// URL")
        return [url.rstrip("/") for url in value]


class PublishSettings(Section):
    """`[publish]`: how new weights reach agents."""

    release: Literal["auto", "canary", "none"] = "none"
    """Release of the best weights: one that promotes itself, one that waits for approval, or none."""
    policy: Path | None = Field(default=None, strict=False)
    """TOML file with the release's policy. Default: that of `penstock release start`."""
    every: int = Field(default=1, ge=1)
    """Steps between published versions; the last weights are always published."""
    keep: int = Field(default=4, ge=1)
    """Newest versions to keep on disk; older ones go when no release and no rollout needs them."""


class OnlineSettings(Section):
    """`[online]`: learning from production, with `train grpo --online`."""

    filter: str = ""
    """Only rollouts with a span that this filter of `penstock spans` finds. Default: all of production."""
    batch_rollouts: int = Field(default=64, ge=2)
    """Rewarded rollouts in one step."""
    quiet_seconds: float = Field(default=60.0, ge=0)
    """Seconds without a call or a reward before a rollout is used; later calls and rewards are not."""
    max_drop: float = Field(default=0.05, ge=0)
    """Reward below the best evaluation so far that counts as low; two low evaluations in a row stop the run."""


class PromptSettings(Section):
    """`[prompts]`: rounds that look for prompts, with `train grpo --prompts`."""

    every: int = Field(default=10, ge=1)
    """Steps between rounds; the first round is before the first step."""
    rollouts: int = Field(default=160, ge=20)
    """Rollouts of one round, in addition to those of the steps."""


class TrainConfig(Section):
    """The whole file; only the model must be named."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    rollouts: RolloutSettings = RolloutSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    engine: EngineSettings = EngineSettings()
    data: DataSettings = DataSettings()
    sft: SftSettings = SftSettings()
    dpo: DpoSettings = DpoSettings()
    inference: InferenceSettings = InferenceSettings()
    publish: PublishSettings = PublishSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    online: OnlineSettings = OnlineSettings()
    prompts: PromptSettings = PromptSettings()

    @model_validator(mode="after")
    def _groups_are_comparable(self) -> Self:
        if self.rollouts.group_size == 1 and self.compares_groups:
            raise ValueError(
                f"rollouts.group_size: in a group of 1 {self.advantage.estimator} has nothing to compare with; "
                'raise it, or set advantage.estimator = "reinforce++"'
            )
        return self

    @model_validator(mode="after")
    def _verl_can_do_it(self) -> Self:
        if self.engine.kind == "verl" and self.model.weights == "full" and self.loss.kl:
            raise ValueError(
                'loss.kl: with engine.kind = "verl" the reference is the model without its adapter; set it to 0, or '
                'model.weights to "lora"'
            )
        return self

    @property
    def compares_groups(self) -> bool:
        """True if rollouts are compared within their group, and one of no group teaches nothing."""
        return self.advantage.estimator != "reinforce++"

    @property
    def learning_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.optimiser.learning_rate or (1e-4 if self.model.weights == "lora" else 1e-6)

    @property
    def versions_directory(self) -> Path:
        """Absolute path of the directory for versions."""
        own = "adapters" if self.model.weights == "lora" else "models"
        return (self.run.directory / own).absolute()


def load(path: Path) -> TrainConfig:
    """Return the configuration in `path`. Raises `gateway.model.toml.ConfigError` naming every wrong key."""
    return validated(TrainConfig, read(path), str(path))


# Refuses valid configurations that do not fit a command: each check raises a `ConfigError` with a way out.


def check_full(config: TrainConfig) -> None:
    """Raise `ConfigError` if all weights are trained and cannot be served."""
    if config.model.weights != "full":
        return
    if config.inference.urls:
        raise ConfigError(
            "inference.urls: what others have started cannot be given all weights under a name of their own; leave it "
            'out and name inference.python, or set model.weights to "lora"'
        )
    if config.publish.release != "none":
        raise ConfigError(
            "publish.release: all weights need a server of their own, and those of a run end with it; set it to "
            '"none", start a server with the directory of the last version, and release that (docs/training.md)'
        )


def check_prompts(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that cannot be trained together with prompts."""
    if config.model.weights == "full":
        raise ConfigError(
            'model.weights: "full" cannot serve the first weights and the last ones at the same time, which --prompts '
            'compares: use "lora"'
        )


def check_online(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that cannot learn from production."""
    wrong = [
        (config.publish.release == "none", "publish.release", '"none" shows production nothing, and rollouts of '
         'weights older than rollouts.staleness are not learnt from: set "auto" or "canary"'),
        (config.rollouts.ahead, "rollouts.ahead", "production's rollouts are not queued: leave it out"),
        (config.rollouts.curriculum, "rollouts.curriculum", "production's tasks are not drawn: leave it out"),
        (config.model.weights == "full", "model.weights", '"full" needs a server for every version that production and '
         'training get: use "lora"'),
    ]  # fmt: skip
    for applies, key, problem in wrong:
        if applies:
            raise ConfigError(f"{key}: {problem}")
