"""Reads the output of cargo and of the test harness for scripts/test. Standard library only.

    workspace   the packages of the workspace and their directories, from `cargo metadata`
    target_directory
    targets     the targets of a package of one kind
    executable  the test binary of a target, from the messages of a build
    select      of a list of integration tests, those that belong to a part
    record      copies the output of `cargo test` and records its results by part
    report      prints failed tests, a table of the parts, and the totals
"""
import argparse
import collections
import json
import os
import re
import sys
import time

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
RUNNING = re.compile(r"^\s+Running .*\(([^)]+)\)$")
DOC_TESTS = re.compile(r"^\s+Doc-tests (\S+)$")
TEST = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
RESULT = re.compile(r"^test result: .*?(\d+) passed; (\d+) failed;")
OUTPUT = re.compile(r"^---- .* ----$")
# The package whose integration tests are divided by module.
DIVIDED = ("toolcrib-server", "it")
LINES_PER_FAILURE = 60
LINES_OF_FAILURES = 400


def read_map(path):
    """Returns the parts of packages and the parts of modules."""
    packages, modules = {}, {}
    with open(path) as lines:
        for line in lines:
            kind, name, part = line.rstrip("\n").split("\t")
            (packages if kind == "package" else modules)[name] = part
    return packages, modules


class Recorder:
    """Counts results by part. The time until a result appears belongs to the part of that result."""

    def __init__(self, options):
        self.part = options.part
        self.passed = collections.Counter()
        self.failed = collections.Counter()
        self.spent = collections.Counter()
        self.output = []
        self.last = time.monotonic()
        self.binaries, self.crates = {}, {}
        self.packages, self.modules = {}, {}
        if not self.part:
            self.packages, self.modules = read_map(options.map)
            self.learn(options.build)
        self.current = None  # (package, target) of the test binary whose output is being read
        self.finished = True
        self.seen = collections.Counter()
        self.keeping = False

    def learn(self, build):
        """Reads which package each test binary and each crate belongs to."""
        self.crates = {name.replace("-", "_"): name for name in self.packages}
        with open(build) as lines:
            for line in lines:
                message = json.loads(line) if line.startswith("{") else {}
                if message.get("reason") != "compiler-artifact" or not message.get("executable"):
                    continue
                package = package_name(message["package_id"])
                self.binaries[os.path.basename(message["executable"])] = (
                    package,
                    message["target"]["name"],
                )

    def part_of(self, test):
        if self.part:
            return self.part
        package, target = self.current or (None, None)
        if (package, target) == DIVIDED and test:
            module = test.split("::")[0]
            if module in self.modules:
                return self.modules[module]
        return self.packages.get(package, package or "tests")

    def take_time(self, part):
        now = time.monotonic()
        self.spent[part] += now - self.last
        self.last = now

    def begin(self, current):
        self.end()
        self.current, self.finished, self.seen = current, False, collections.Counter()

    def end(self):
        """Counts a test binary that ended without a result, because it crashed, as one failure."""
        if not self.finished:
            part = self.part_of(None)
            self.failed[part] += 1
            self.output.append([f"---- a test binary of {part} ended without a result ----"])
        self.finished = True

    def line(self, line):
        if match := RUNNING.match(line):
            self.begin(self.binaries.get(os.path.basename(match[1]), (None, None)))
        elif match := DOC_TESTS.match(line):
            self.begin((self.crates.get(match[1].replace("-", "_")), "doc"))
        elif match := TEST.match(line):
            part = self.part_of(match[1])
            self.take_time(part)
            if match[2] != "ignored":
                self.seen[match[2]] += 1
                (self.passed if match[2] == "ok" else self.failed)[part] += 1
        elif match := RESULT.match(line):
            # A line of a test may be unreadable because another process wrote into it. The totals
            # are right, so the difference goes to the part of the package.
            part = self.part_of(None)
            self.take_time(part)
            self.passed[part] += int(match[1]) - self.seen["ok"]
            self.failed[part] += int(match[2]) - self.seen["FAILED"]
            self.finished, self.seen = True, collections.Counter()
        self.keep(line)

    def keep(self, line):
        """Keeps the output of failed tests and the errors of cargo."""
        if OUTPUT.match(line):
            self.output.append([line])
            self.keeping = True
        elif line.startswith(("failures:", "test result:")):
            self.keeping = False
        elif self.keeping and len(self.output[-1]) < LINES_PER_FAILURE:
            self.output[-1].append(line)
        elif line.startswith("error") or (line.startswith("test ") and line.endswith(" FAILED")):
            self.output.append([line])


def package_name(package_id):
    """Returns the name in a package id: `path+file:///a/engine#toolcrib@0.1.0` or `…/store#0.1.0`."""
    place, _, rest = package_id.partition("#")
    return rest.split("@")[0] if "@" in rest else place.rstrip("/").rsplit("/", 1)[-1]


def workspace(options):
    with open(options.metadata) as file:
        metadata = json.load(file)
    order = {name: place for place, name in enumerate(metadata["workspace_members"])}
    for package in sorted(metadata["packages"], key=lambda package: order[package["id"]]):
        directory = os.path.basename(os.path.dirname(package["manifest_path"]))
        print(package["name"], directory, sep="\t")


def target_directory(options):
    with open(options.metadata) as file:
        print(json.load(file)["target_directory"])


def targets(options):
    with open(options.metadata) as file:
        metadata = json.load(file)
    for package in metadata["packages"]:
        for target in package["targets"]:
            if package["name"] == options.package and options.kind in target["kind"]:
                print(target["name"])


def executable(options):
    with open(options.build) as lines:
        for line in lines:
            message = json.loads(line) if line.startswith("{") else {}
            if message.get("reason") == "compiler-artifact" and message["profile"]["test"]:
                if message["target"]["name"] == options.target and message.get("executable"):
                    return print(message["executable"])
    sys.exit(f"the build has no test binary of the target {options.target}")


def select(options):
    packages, modules = read_map(options.map)
    rest = packages[DIVIDED[0]]
    for line in sys.stdin:
        if line.rstrip("\n").endswith(": test"):
            name = line.rstrip("\n").removesuffix(": test")
            if modules.get(name.split("::")[0], rest) == options.part:
                print(name)


def record(options):
    recorder = Recorder(options)
    for line in sys.stdin:
        sys.stdout.write(line)
        sys.stdout.flush()
        recorder.line(COLOR.sub("", line.rstrip("\n")))
    recorder.end()
    ran = sum(recorder.passed.values()) + sum(recorder.failed.values())
    if options.expect is not None and ran < options.expect:
        recorder.failed[options.part] += 1
        recorder.output.append([f"{options.part}: {options.expect} tests selected, {ran} ran"])
    with open(options.results, "a") as file:
        for part in recorder.spent | recorder.passed | recorder.failed:
            counts = recorder.passed[part], recorder.failed[part], int(recorder.spent[part] * 1000)
            print(part, *counts, sep="\t", file=file)
    with open(options.failures, "a") as file:
        for lines in recorder.output:
            print(*lines, sep="\n", file=file)


def report(options):
    passed, failed, spent = collections.Counter(), collections.Counter(), collections.Counter()
    with open(options.results) as lines:
        for line in lines:
            part, *counts = line.rstrip("\n").split("\t")
            for counter, count in zip((passed, failed, spent), counts):
                counter[part] += int(count)
    with open(options.failures) as file:
        failures = file.read().splitlines()
    if failures:
        print("\n== failures")
        print(*failures[:LINES_OF_FAILURES], sep="\n")
        if len(failures) > LINES_OF_FAILURES:
            print(f"… {len(failures) - LINES_OF_FAILURES} more lines, see above")
    print("\n== done")
    print(f"{'part':<10}  {'passed':>6}  {'failed':>6}  {'seconds':>7}")
    order = {part: place for place, part in enumerate(options.order)}
    for part in sorted(spent, key=lambda part: order.get(part, len(order))):
        row = f"{part:<10}  {passed[part]:>6}  {failed[part]:>6}  {spent[part] / 1000:>7.1f}"
        print(row)
    print(f"{sum(passed.values())} passed, {sum(failed.values())} failed")


def main():
    commands = (workspace, target_directory, targets, executable, select, record, report)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=[command.__name__ for command in commands])
    parser.add_argument("--results", help="file of results: part, passed, failed, milliseconds")
    parser.add_argument("--failures", help="file of the output of what failed")
    parser.add_argument("--metadata", help="file with the output of cargo metadata")
    parser.add_argument("--build", help="file with the messages of a build")
    parser.add_argument("--map", help="file with the parts of packages and modules")
    parser.add_argument("--part", help="the part that everything belongs to")
    parser.add_argument("--package")
    parser.add_argument("--kind")
    parser.add_argument("--target")
    parser.add_argument("--expect", type=int, help="number of tests that were selected")
    parser.add_argument("--order", nargs="*", default=[], help="order of the parts in the table")
    options = parser.parse_args()
    {command.__name__: command for command in commands}[options.command](options)


if __name__ == "__main__":
    main()
