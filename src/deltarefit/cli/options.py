"""Every argument and option of every verb, defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltarefit.pipeline import MOST_PAYLOAD_BYTES, PAYLOAD_BYTES

_OUTPUT, _ACCESS, _ENGINE, _KEYS = "Output", "Store access", "Serving engines", "Signatures"
_ADVICE = "Advice"
_STORE_HELP = (
    "Where the run lives: a directory, file:///dir, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or a "
    "relay at https://host:port; several URLs joined by commas are tried in that order."
)
_CHECKPOINT_HELP = "A .safetensors file, or a Hugging Face checkpoint directory."

Store = Annotated[str, typer.Argument(metavar="STORE", help=_STORE_HELP, show_default=False)]
MaybeStore = Annotated[
    str | None,
    typer.Argument(metavar="[STORE]", help=f"Also check this store. {_STORE_HELP}", show_default=False),
]
To = Annotated[str, typer.Option("--to", metavar="STORE", help=_STORE_HELP, show_default=False)]
Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help=_CHECKPOINT_HELP, show_default=False)]
CheckpointA = Annotated[Path, typer.Argument(metavar="A", help=_CHECKPOINT_HELP, show_default=False)]
CheckpointB = Annotated[Path, typer.Argument(metavar="B", help="The other one.", show_default=False)]
Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]", help="A directory kept by `follow`, or any checkpoint; or give an engine.", show_default=False
    ),
]
Into = Annotated[
    Path | None,
    typer.Option(
        "--into",
        metavar="DIR",
        help="The checkpoint directory to keep at the head. New or empty the first time: files that are not "
        "ours are never overwritten.",
        show_default=False,
    ),
]
Vllm = Annotated[
    str | None,
    typer.Option(
        "--vllm",
        metavar="URL",
        help="A vLLM server on this machine, such as http://127.0.0.1:8000, started with VLLM_SERVER_DEV_MODE=1 and "
        "--worker-extension-cls deltarefit.targets.vllm.RefitWorker.",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
Sglang = Annotated[
    str | None,
    typer.Option(
        "--sglang",
        metavar="URL",
        help="An SGLang server on this machine, such as http://127.0.0.1:30000, started with "
        "--custom-weight-loader deltarefit.targets.sglang.load.",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
InFlight = Annotated[
    str | None,
    typer.Option(
        "--in-flight",
        metavar="HOW",
        help="What becomes of requests that run when a refit begins: keep (they stand still, and go on with the new "
        "weights), wait (for them to end; not with SGLang) or abort.",
        show_default="keep",
        rich_help_panel=_ENGINE,
    ),
]
Ready = Annotated[
    str | None,
    typer.Option(
        "--ready",
        metavar="HOST:PORT",
        help="Serve GET /ready there: 200 while the engine holds the newest version known, else 503.",
        show_default=False,
        rich_help_panel=_ENGINE,
    ),
]
Scrub = Annotated[
    float | None,
    typer.Option(
        "--scrub",
        metavar="S",
        min=1,
        help="Prove all bits of the engine again after so many seconds without anything to do.",
        show_default="only at the start",
        rich_help_panel=_ENGINE,
    ),
]
Version = Annotated[str, typer.Argument(metavar="[VERSION]", help="A version number, or `head`.")]
AtVersion = Annotated[
    int | None,
    typer.Option(
        "--version",
        metavar="N",
        min=1,
        help="The version that DIR, or the engine, should hold.",
        show_default="what DIR's own header says; for any other checkpoint the head",
    ),
]
Step = Annotated[int, typer.Option("--step", metavar="N", min=0, help="The trainer's own step number, for the log.")]
Baseline = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="DIR",
        help="Where the bits of the head are kept between calls, to compare with; rebuilt from the store if "
        "missing, old or damaged. If not given: deltarefit/baseline/RUN in $XDG_CACHE_HOME or ~/.cache.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, help="Threads to encode with.", show_default="one per CPU; publish: at most 4"
    ),
]
PayloadBytes = Annotated[
    int,
    typer.Option(
        "--payload-bytes",
        metavar="N",
        min=1,
        max=MOST_PAYLOAD_BYTES,
        help="Cut payload objects at about this size before compression.",
        show_default=f"{PAYLOAD_BYTES >> 20} MiB",
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="stage: receivers write after the commit, in a short pause. stream: they write on arrival, paused all the "
        "while; takes less memory.",
    ),
]
Votes = Annotated[
    str,
    typer.Option(
        "--votes",
        metavar="WHO",
        help="Before the commit all receivers that follow must hold the version, or so many, or none. One that "
        "is silent for 10 s is not waited for. Nobody is asked for a first version.",
    ),
]
MinReceivers = Annotated[
    int,
    typer.Option(
        "--min-receivers",
        metavar="N",
        min=0,
        help="Commit nothing but a first version unless so many hold it.",
    ),
]
Deadline = Annotated[
    float,
    typer.Option(
        "--deadline", metavar="S", min=1, help="Seconds to wait for receivers that give signs of life, or are too few."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="What this receiver is called among those that follow the run.",
        show_default="the host, and a hash of what is kept",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Stop as soon as the head is held.")]
Poll = Annotated[
    float,
    typer.Option(
        "--poll",
        metavar="S",
        min=0.01,
        max=3600,
        help="Seconds between looks at the store; a commit may wait as long for this receiver's vote.",
    ),
]
NoProve = Annotated[
    bool,
    typer.Option(
        "--no-prove",
        help="Trust the header at the start, instead of reading all weights once to prove their bits.",
    ),
]
SwitchRun = Annotated[
    bool,
    typer.Option("--switch-run", help="If weights of another run are held, replace them instead of refusing."),
]
Attempts = Annotated[int, typer.Option("-n", "--attempts", metavar="N", min=1, help="How many, the newest.")]
Top = Annotated[
    int,
    typer.Option("-n", "--top", metavar="N", min=0, help="List the N tensors with most changes; all with -v."),
]
Tensors = Annotated[
    bool,
    typer.Option("--tensors", help="Count changes per tensor, too. This fetches the version's payloads."),
]
Quick = Annotated[bool, typer.Option("--quick", help="A tiny model and few rounds: seconds instead of minutes.")]
RelayCases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="NAME",
        help="Only this: egress, depth, nginx, kills or distance. May be given several times.",
        show_default="all",
    ),
]
Ranks = Annotated[int, typer.Option("--ranks", metavar="N", min=1, max=4, help="Processes of the trainer.")]
ModelSize = Annotated[
    str,
    typer.Option("--size", metavar="NAME", help="The model: tiny, small or medium (0.2, 54, 226 million parameters)."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where prepared models and data are kept. If not given: in $XDG_CACHE_HOME or ~/.cache.",
        show_default=False,
    ),
]

KeyDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.", show_default=False)]
KeyKind = Annotated[
    str,
    typer.Option(
        "--kind",
        metavar="KIND",
        help="ed25519, whose trust file holds nothing secret, or hmac, where trainer and receivers share one secret.",
    ),
]
KeyName = Annotated[str, typer.Option("--name", metavar="ID", help="The key's name, by which trust files know it.")]
Sign = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="KEYFILE",
        help="Sign what is written with this key, made by `keygen`. A run is signed from its first record on, or not.",
        show_default=False,
        rich_help_panel=_KEYS,
    ),
]
Trust = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust",
        metavar="FILE",
        help="Believe only records that a key of this trust file signed. May be given several times.",
        show_default="records are not verified",
        rich_help_panel=_KEYS,
    ),
]

Within = Annotated[
    Path | None,
    typer.Option(
        "--in",
        metavar="DIR",
        help="Put the version together in a temporary directory there, which needs room for the model.",
        show_default="in memory",
    ),
]
Advise = Annotated[bool, typer.Option("--advise", help="Only say how often an anchor pays.", rich_help_panel=_ADVICE)]
JoinsPerVersion = Annotated[
    float,
    typer.Option(
        "--joins-per-version",
        metavar="X",
        help="Receivers that start or restart while one version is the newest.",
        rich_help_panel=_ADVICE,
    ),
]
RecoveryS = Annotated[
    float,
    typer.Option(
        "--recovery-s",
        metavar="S",
        min=0,
        help="Longest time in which a new receiver must be able to fetch anchor and chain; needs --bandwidth.",
        show_default="no bound",
        rich_help_panel=_ADVICE,
    ),
]
Bandwidth = Annotated[
    float,
    typer.Option(
        "--bandwidth",
        metavar="MB/S",
        min=0,
        help="What a receiver reads from the store in a second.",
        show_default=False,
        rich_help_panel=_ADVICE,
    ),
]
Keep = Annotated[int, typer.Option("--keep", metavar="N", min=1, help="How many readable anchors stay.")]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        metavar="S",
        min=0,
        help="Seconds between the announcement and the deletion. A reader that shows no sign of life in that time is "
        "taken for dead; with 0 none is.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]
Deep = Annotated[bool, typer.Option("--deep", help="Read and hash all bytes of the anchors that stay.")]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="How many seeds to play.")]
FirstSeed = Annotated[int, typer.Option("--first", metavar="K", min=0, help="The first of them.")]
SimulatedMode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="unlimited: faults never stop, safety is judged; healing: they stop, and all "
        "must be well soon after; both.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes to play on; by default one per CPU.")
]
Trace = Annotated[bool, typer.Option("--trace", help="Show all that happens in each run.")]

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Machine-readable: the last line of stdout is one JSON object.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=_OUTPUT)]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bars.", rich_help_panel=_OUTPUT)]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="An S3 server other than Amazon's; plain http:// is allowed.",
        show_default="$DELTAREFIT_ENDPOINT or $AWS_ENDPOINT_URL",
        rich_help_panel=_ACCESS,
    ),
]
Region = Annotated[
    str | None,
    typer.Option(
        "--region",
        metavar="NAME",
        help="The bucket's region.",
        show_default="$AWS_REGION",
        rich_help_panel=_ACCESS,
    ),
]
