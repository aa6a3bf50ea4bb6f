"""The apiserver's checks across fields, and of changes, in CEL: a copy of core's own checks.

core's types refuse the same values when the operator reads a job. These rules report the error to the user at once, on
`kubectl apply`. `slices` and `schedule` have no type for the apiserver, so CEL cannot read them here: `policy.py`
checks them. Reference: https://kubernetes.io/docs/reference/using-api/cel
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core import names
from penstock.core.kubernetes_spec import MOST_NAME_CHARACTERS

FORBIDDEN = "FieldValueForbidden"
CANNOT_CHANGE = "cannot be changed: make a new job, with checkpoint.resumeFrom to go on from this one's checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """``holds``, in CEL over ``self``, or else ``message`` about the field at ``path``.

    ``message_expression``, in CEL, makes a message with values in it; ``message`` is used where that fails.
    """

    holds: str
    message: str
    path: str = ""
    message_expression: str = ""
    reason: str = "FieldValueInvalid"

    def to_manifest(self) -> dict[str, str]:
        """The rule in the form of ``x-kubernetes-validations``."""
        manifest = {"rule": self.holds, "message": self.message, "messageExpression": self.message_expression}
        manifest |= {"fieldPath": self.path, "reason": self.reason}
        return {key: value for key, value in manifest.items() if value}


def _one(name: str) -> str:
    """The pinned number, or 1."""
    return f"(has(self.parallelism.{name}) ? self.parallelism.{name} : 1)"


def _same(path: str) -> Rule:
    return Rule(
        holds=f"self.{path} == oldSelf.{path}",
        message=CANNOT_CHANGE,
        path=f".{path}",
        reason=FORBIDDEN,
    )


def _same_if_any(path: str) -> Rule:
    both = f"has(self.{path}) == has(oldSelf.{path})"
    equal = f"(!has(self.{path}) || self.{path} == oldSelf.{path})"
    return Rule(holds=f"{both} && {equal}", message=CANNOT_CHANGE, path=f".{path}", reason=FORBIDDEN)


def _keys(field: str, pattern: str) -> Rule:
    return Rule(
        holds=f"!has(self.{field}) || self.{field}.all(key, key.matches('^({pattern})$'))",
        message=f"a key is not a name: {names.REMEDIES[pattern]}",
        path=f".{field}",
    )


def _in_volumes(path: str, present: str = "true") -> Rule:
    """The root that ``data://ROOT/...`` names has a volume."""
    root = f"('data/' + {path}.substring(7).split('/')[0])"
    return Rule(
        holds=f"!({present}) || !{path}.startsWith('data://') || {root} in self.kubernetes.volumes",
        message="names a root of data that kubernetes.volumes lacks",
        message_expression=f"'needs kubernetes.volumes[\"%s\"]: the claim that holds %s'.format([{root}, {path}])",
        path=f".{path.removeprefix('self.')}",
    )


def _some_bytes(field: str) -> Rule:
    """A quantity that may also be written as a string is more than zero."""
    return Rule(
        holds=f"!has(self.{field}) || type(self.{field}) == int || self.{field}.matches('[1-9]')",
        message="is not positive: write an amount such as 4Gi",
        path=f".{field}",
    )


def _exactly_one(*fields: str, remedy: str) -> Rule:
    """Of fields that are left out where they do not count."""
    count = " + ".join(f"(has(self.{field}) ? 1 : 0)" for field in fields)
    listed = f"{', '.join(fields[:-1])} and {fields[-1]}"
    return Rule(holds=f"{count} == 1", message=f"needs exactly one of {listed}: {remedy}")


_RANKS_PER_POD = "does not divide ranks: choose a divisor"
_PRODUCT = f"({_one('dp')} * {_one('tp')} * {_one('pp')})"
_DP, _MICRO_BATCH = _one("dp"), _one("microBatch")

JOB = (
    Rule(
        holds=f"self.metadata.name.matches('^[a-z][-a-z0-9]*$') && self.metadata.name.size() <= {MOST_NAME_CHARACTERS}",
        message=(
            f"metadata.name: on a cluster at most {MOST_NAME_CHARACTERS} lower-case letters, digits and dashes, a "
            "letter first: names of pods are longer by what follows the job's"
        ),
        path=".metadata",
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "PipelineJob": JOB,
    "ClusterProfile": JOB,
    "JobSpec": (
        Rule(
            holds="self.model.family != 'gpt2' || self.model.positions >= self.data.sequenceLength",
            message="exceeds the model's positions: set model.positions or shorten the sequence",
            message_expression="'exceeds the model\\'s %d positions: set model.positions to %d or shorten the sequence'"
            ".format([self.model.positions, self.data.sequenceLength])",
            path=".data.sequenceLength",
        ),
        Rule(
            holds="has(self.model.vocab) || has(self.data.tokenizer.vocab) || "
            "(has(self.data.tokenizer.train) && self.data.tokenizer.train == 'bytes')",
            message="is missing, and the tokenizer does not define it: write the tokenizer's number of tokens",
            path=".model.vocab",
            reason="FieldValueRequired",
        ),
        Rule(
            holds=f"self.resources.ranks / {_PRODUCT} * {_PRODUCT} >= "
            "(has(self.resources.minRanks) ? self.resources.minRanks : self.resources.ranks)",
            message="dp x tp x pp does not divide ranks, or a number from minRanks on: pin factors of resources.ranks",
            message_expression="'dp x tp x pp = %d does not divide %s: pin factors of resources.ranks'.format("
            f"[{_PRODUCT}, has(self.resources.minRanks) ? 'any number of ranks from %d to %d'"
            ".format([self.resources.minRanks, self.resources.ranks]) : 'ranks %d'.format([self.resources.ranks])])",
            path=".parallelism",
        ),
        Rule(
            holds=f"self.training.globalBatch % {_DP} == 0",
            message="dp does not divide globalBatch: pin a divisor of training.globalBatch",
            message_expression="'dp %d does not divide globalBatch %d: pin a divisor of training.globalBatch'"
            f".format([{_DP}, self.training.globalBatch])",
            path=".parallelism",
        ),
        Rule(
            holds=f"{_MICRO_BATCH} * {_DP} <= self.training.globalBatch",
            message="microBatch is more than the sequences of a replica: pin at most as many",
            message_expression="'microBatch %d is more than the %d sequences of a replica: pin at most as many'"
            f".format([{_MICRO_BATCH}, self.training.globalBatch / {_DP}])",
            path=".parallelism",
        ),
        Rule(
            holds="!has(self.parallelism.stages) || self.parallelism.stages.sum() == double(self.model.layers)",
            message="does not sum to the model's layers: change the numbers so that their sum agrees",
            message_expression="'stages hold %s blocks, the model has %d: change the numbers so that their sum agrees'"
            ".format([self.parallelism.stages.sum(), self.model.layers])",
            path=".parallelism.stages",
        ),
        Rule(  # the apiserver takes a factor below one for nothing where it divides a whole number by it
            holds="!has(self.parallelism.stages) || self.parallelism.stages.all(s, double(int(s * 2.0)) == s * 2.0)",
            message="has a part that is not a multiple of half a block: write numbers such as 4 or 4.5",
            path=".parallelism.stages",
        ),
        Rule(
            holds="self.resources.ranks % self.kubernetes.ranksPerPod == 0",
            message=_RANKS_PER_POD,
            path=".kubernetes.ranksPerPod",
        ),
        Rule(
            holds="self.objective != 'cost' || self.pricePerDeviceHour > 0.0",
            message="cost needs a price: write one above 0",
            path=".pricePerDeviceHour",
        ),
        _in_volumes("self.data.source"),
        _in_volumes("self.data.tokenizer.file", "has(self.data.tokenizer.file)"),
        *map(_same, ("model", "data", "training", "parallelism", "objective", "pricePerDeviceHour", "checkpoint")),
        *map(_same, ("kubernetes", "resources.device", "resources.memoryPerRank", "resources.threadsPerRank")),
        _same_if_any("resources.minRanks"),
    ),
    "ModelSpec": (
        Rule(
            holds="self.hidden % self.heads == 0",
            message="does not divide hidden: choose one of its divisors",
            message_expression="'hidden %d is not divisible by heads %d'.format([self.hidden, self.heads])",
            path=".heads",
        ),
        Rule(
            holds="self.family != 'llama' || self.hidden % self.heads != 0 || (self.hidden / self.heads) % 2 == 0",
            message="rotary positions need an even head dimension: choose heads so that hidden / heads is even",
            path=".heads",
        ),
        Rule(
            holds="self.kvHeads == 0 || self.heads % self.kvHeads == 0",
            message="does not divide heads: choose one of its divisors",
            message_expression="'heads %d is not divisible by kvHeads %d'.format([self.heads, self.kvHeads])",
            path=".kvHeads",
        ),
        Rule(
            holds="self.family != 'gpt2' || self.kvHeads == 0 || self.kvHeads == self.heads",
            message="gpt2 has no grouped-query attention: leave kvHeads out",
            path=".kvHeads",
        ),
    ),
    "DataSpec": (
        Rule(
            holds=f"self.source == 'python-stdlib' || self.source.matches('^data://{names.LABEL}(/|$)')",
            message="does not exist on a cluster: write python-stdlib, or data://NAME/PATH with a volume data/NAME",
            path=".source",
        ),
    ),
    "TokenizerSpec": (
        _exactly_one("train", "file", remedy="write {train: bpe, vocab: 4096}"),
        Rule(
            holds="!has(self.train) || self.train != 'bpe' || (has(self.vocab) && self.vocab >= 257)",
            message="byte-level BPE needs at least 257 tokens: write vocab: 4096",
            path=".vocab",
        ),
        Rule(
            holds=f"!has(self.file) || self.file.matches('^data://{names.LABEL}/')",
            message="does not exist on a cluster: write data://NAME/PATH with a volume data/NAME",
            path=".file",
        ),
    ),
    "ResourcesSpec": (
        Rule(
            holds="!has(self.minRanks) || self.minRanks <= self.ranks",
            message="is more than ranks: lower it",
            path=".minRanks",
        ),
        _some_bytes("memoryPerRank"),
    ),
    "CheckpointSpec": (
        Rule(
            holds="!has(self.resumeFrom) || self.resumeFrom.matches('^out://[^/]+/[0-9]+/[0-9]+/?$')",
            message="names no checkpoint: write out://UID/ATTEMPT/STEP",
            path=".resumeFrom",
        ),
    ),
    "KubernetesSpec": (
        _keys("volumes", names.VOLUME_ROOT),
        _keys("nodeSelector", names.QUALIFIED),
    ),
    "Toleration": (
        Rule(
            holds="self.key != '' || self.operator == 'Exists'",
            message="Equal needs a key: add the taint's key, or operator: Exists",
            path=".key",
        ),
        Rule(
            holds="self.value == '' || self.operator != 'Exists'",
            message="Exists compares no value: leave value out",
            path=".value",
        ),
        Rule(
            holds="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="only NoExecute is tolerated for a time: write effect: NoExecute, or leave tolerationSeconds out",
            path=".tolerationSeconds",
        ),
    ),
    "EnvVar": (
        Rule(
            holds="self.value == '' || !has(self.valueFrom)",
            message="is set together with value: keep one of them",
            path=".valueFrom",
        ),
    ),
    "EnvSource": (
        _exactly_one(
            "secretKeyRef",
            "configMapKeyRef",
            "fieldRef",
            remedy="write secretKeyRef: {name: my-secret, key: token}",
        ),
    ),
    "VolumeSpec": (
        _exactly_one("claim", "template", remedy="write {claim: NAME}, or {template: {size: 10Gi}}"),
        Rule(
            holds="self.reclaim != 'Delete' || has(self.template)",
            message="an existing claim is not deleted with the job: leave reclaim out",
            path=".reclaim",
        ),
    ),
    "ClaimTemplate": (_some_bytes("size"),),
    "ClusterProfileSpec": (
        Rule(
            holds="self.ranks % self.ranksPerPod == 0",
            message=_RANKS_PER_POD,
            path=".ranksPerPod",
        ),
        _some_bytes("memoryPerRank"),
    ),
}
"""By the title of the schema they belong to, which is the type's name."""
