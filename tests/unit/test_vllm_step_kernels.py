"""How bench.vllm.step_kernels reads a trace of torch's profiler."""

import gzip
import json

from bench.vllm.step_kernels import tables

PREFILL, DECODE = (
    ["rms_norm", "gate", "topk", "dispatch", "experts", "combine", "add_rsqrt", "attention"],
    ["rms_norm", "gate", "topk", "experts|x", "add_rsqrt", "topk_of_the_next_layer", "rms_norm"],
)


def test_a_table_goes_from_the_gate_to_the_next_norm(tmp_path):
    events, start = [], 0
    for step in (PREFILL, ["in between"], DECODE):
        if len(step) > 1:
            mark = {"cat": "gpu_user_annotation", "name": "execute_context_1", "ts": start, "dur": len(step)}
            events += [mark, mark | {"cat": "user_annotation"}]
        for name in step:
            events.append({"cat": "kernel", "name": name, "ts": start, "dur": 0.5, "args": {"stream": 7}})
            start += 1
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events[::-1]}).encode()))
    prefill, decode = tables(path).split("### decode")
    assert [line.split(" | ")[2] for line in prefill.splitlines()[4:] if line] == [f"{each} |" for each in PREFILL[1:7]]
    assert decode.splitlines()[-2:] == ["| 0.5 | 7 | experts x |", "| 0.5 | 7 | add_rsqrt |"]
