"""Odd inputs of every command: what is typed, the exit code, and a part of what is said.

FILE stands for a file that exists, FOLDER for an empty folder, NONE for a path in no folder, LONG for a name that no
file system takes, FULL for a device without space.
"""

from __future__ import annotations

FILE, FOLDER, NONE, LONG, FULL = "{file}", "{folder}", "/nowhere/x", "{folder}/" + "x" * 300, "/dev/full"

SIZES = {
    "demo": ("ranks", "tokens", "hidden", "experts", "topk"),
    "trace": ("ranks", "tokens", "hidden", "experts", "topk", "steps"),
    "tune": ("hidden", "topk", "experts", "iterations"),
    "plan": ("ranks", "max-tokens", "hidden", "experts", "topk", "gpus-per-node"),
    "doctor": ("hidden", "max-tokens"),
}
LISTS = ("ranks", "tokens", "hidden", "topk", "experts", "max-sms", "gpus-per-node")
NUMBERS = ("0", "-1", "1.5", "abc", "", "99999999999999999999")
COMMANDS = ("demo", "bench", "trace", "tune", "plan", "backends", "doctor")

Case = tuple[tuple[str, ...], int, str]


def _cases() -> list[Case]:
    found: list[Case] = [
        ((command, f"--{name}", number), 2, f"--{name}")
        for command, names in SIZES.items()
        for name in names
        for number in NUMBERS
    ]
    found += [(("bench", f"--{name}", text), 2, f"--{name}") for name in LISTS for text in ("-1", "1,x", ",", "9" * 30)]
    for command in COMMANDS:
        found += [
            ((command, "--wrong"), 2, "--wrong"),
            ((command, "-q", "-v"), 2, "exclude each other"),
            ((command, "-h"), 0, "Exit codes"),
            ((command, "--help"), 0, "Exit codes"),
            ((command, "one", "two"), 2, "unexpected extra argument"),
        ]
    for command in ("demo", "plan", "backends", "doctor", "bench"):
        found += [((command, "--output", path), 2, "expected") for path in (NONE, LONG, FOLDER, f"{FILE}/x")]
    found += [(("trace", "--device", "cpu", "--output", path), 2, "expected") for path in (LONG, f"{FILE}/x")]
    for command, options in (("demo", ()), ("bench", ()), ("plan", ("--nodes", "2")), ("doctor", ("--selftest",))):
        pictures = ("x.gif", f"{NONE}.png", f"{LONG}.png", f"{FILE}/x.png", "x")
        found += [((command, *options, "--plot", path), 2, "expected") for path in pictures]
    return found


CASES: list[Case] = [
    *_cases(),
    ((), 2, "Commands"),
    (("dmeo",), 2, "Did you mean 'demo'?"),
    (("",), 2, "No such command"),
    (("--version",), 0, "ep-a2a"),
    (("plan",), 0, "MiB"),
    (("plan", "--output", FULL), 2, "No space left"),
    (("plan", "--json", "--output", f"{FOLDER}/plan.json"), 0, "bytes_per_gpu"),
    (("plan", "--hidden", "1000000000"), 2, "fit into a GPU"),
    (("plan", "--hidden", "3"), 2, "--hidden"),
    (("plan", "--combine-quant", "x"), 2, "--combine-quant to be one of"),
    (("plan", "--layout", "x"), 2, "--layout to be one of"),
    (("bench", "--contenders", "foo"), 2, "--contenders out of"),
    (("doctor", "--pair-secs", "1"), 2, "--selftest"),
    (("demo", "--backend", "foo"), 2, "--backend or EP_A2A_BACKEND"),
    (("plan", "--dtype", "int3"), 2, "--dtype"),
    (("plan", "--quant", "fp3"), 2, "--quant"),
    (("plan", "--vllm", NONE), 2, "--vllm"),
    (("plan", "--vllm", FILE), 2, "config.json"),
    (("plan", "--vllm", FOLDER), 2, "config.json"),
    (("plan", "--vllm", LONG), 2, "--vllm"),
    (("plan", "--nodes", ""), 2, "--nodes"),
    (("plan", "--nodes", "two"), 2, "--nodes"),
    (("plan", "--nodes", "2", "--nic-gbps", "0"), 2, "--nic-gbps"),
    (("plan", "--nodes", "2", "--nic-gbps", "nan"), 2, "--nic-gbps"),
    (("plan", "--nodes", "2", "--credits", "0"), 2, "--credits"),
    (("plan", "--nodes", "2", "--markdown", f"{NONE}.md"), 2, "/nowhere"),
    (("plan", "--nodes", "2", "--markdown", f"{FOLDER}/a", "--output", f"{FOLDER}/a"), 2, "of its own"),
    (("plan", "--seed", "1"), 2, "--nodes"),
    (("plan", "--nodes", "2", "--vllm", FILE), 2, "--vllm"),
    (("backends", "mroi"), 2, "Did you mean"),
    (("backends", "mori"), 0, "not installed"),
    (("backends", "mori", "--json"), 0, "mori_high_throughput"),
    (("backends", "--json", "--markdown"), 2, "--markdown"),
    (("doctor", "--plot", "rates.png"), 2, "--selftest"),
    (("doctor", "--ranks-per-node", "8,"), 2, "--ranks-per-node"),
    (("doctor", "--ranks-per-node", "9" * 30), 2, "--ranks-per-node"),
    (("doctor", "--ask-secs", "-1"), 2, "--ask-secs"),
    (("doctor", "--ask-secs", "nan"), 2, "--ask-secs"),
    (("doctor", "--pair-secs", "-1"), 2, "--pair-secs"),
    (("demo", "--device", "tpu"), 2, "--device"),
    (("demo", "--device", "cuda"), 2, "--device cuda"),
    (("trace", "--device", "cuda"), 2, "--device cuda"),
    (("bench", "--device", "cuda"), 2, "--device cuda"),
    (("tune",), 2, "GPUs to tune on"),
    (("demo", "--text", NONE), 2, "--text"),
    (("demo", "--text", FOLDER), 2, "--text"),
    (("demo", "--text", LONG), 2, "--text"),
    (("demo", "--topk", "17"), 2, "Lower --topk."),
    (("demo", "--hidden", "7"), 2, "--hidden"),
    (("demo", "--hidden", "12"), 2, "multiple of 16"),
    (("demo", "--hidden", "192", "--quant", "fp8_per_1x128"), 2, "multiple of 128"),
    (("demo", "--quant", "fp4"), 2, "fp8_per_token"),
    (("demo", "--backend", "navie"), 2, "Did you mean 'naive'?"),
    (("demo", "--seed", "-1"), 2, "--seed"),
    (("demo", "--output", f"{FOLDER}/a.png", "--plot", f"{FOLDER}/a.png"), 2, "of its own"),
    (("trace", "--topk", "9", "--output", FOLDER), 2, "--topk"),
    (("trace", "--output", FILE), 2, "is a file"),
    (("trace", "--layout", "round", "--output", FOLDER), 2, "--layout"),
    (("bench", "--contenders", "smoke"), 2, "smoke"),
    (("bench", "--contenders", ""), 2, "--contenders"),
    (("bench", "--layout", "round"), 2, "layout"),
    (("bench", "--routing", "round"), 2, "routing"),
    (("bench", "--dtype", "int3"), 2, "dtype"),
    (("bench", "--max-tokens", "1", "--tokens", "2"), 2, "--max-tokens"),
    (("bench", "--json", f"{NONE}.jsonl"), 2, "unexpected extra argument"),
    (("bench", f"--json={NONE}.jsonl"), 2, "does not take a value"),
]

VARIABLES: list[tuple[str, str]] = [
    ("EP_A2A_TIMEOUT_SECS", "abc"),
    ("EP_A2A_TIMEOUT_SECS", "-1"),
    ("EP_A2A_TIMEOUT_SECS", "nan"),
    ("EP_A2A_FIRST_TIMEOUT_SECS", "0"),
    ("EP_A2A_LOG_LEVEL", "LOUD"),
    ("EP_A2A_COUNTERS", "many"),
    ("EP_A2A_SHARED_EXPERTS", "sometimes"),
    ("EP_A2A_RDMA_DEVICES", ",,"),
]
"""Variables that cannot be used: a command refuses them, and --help does not look."""
