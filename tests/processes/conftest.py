import pytest

from tests.launch.jobs import Launched
from tests.processes.checks import outcomes


@pytest.fixture(scope="module")
def run_checks(tmp_path_factory):
    """Run a worker script on some ranks, once, and give what came of it."""
    known = {}

    def run(module, ranks, *arguments, limit_s):
        job = (module, ranks, arguments)
        if job not in known:
            folder = tmp_path_factory.mktemp("job")
            options, names = arguments[:-1], arguments[-1]
            launched = Launched(
                folder,
                ("-np", str(ranks), "-m", f"tests.processes.{module}")
                + (*options, str(folder), *names),
            )
            done = launched.finish(limit_s)
            known[job] = outcomes(folder, ranks), done
        return known[job]

    def expect(module, ranks, name, *arguments, limit_s):
        results, done = run(module, ranks, *arguments, limit_s=limit_s)
        for rank, result in enumerate(results):
            outcome = result.get(name, "was not reached")
            assert outcome == "ok", (
                f"rank {rank}: {outcome}\n{done.out[-3000:]}{done.err[-3000:]}"
            )

    return expect
