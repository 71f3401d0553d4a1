# Short names for the commands of the project. `just --list` shows them.

# Build the release binary, target/release/toolcrib
build:
    cargo build --release

# Run all checks and tests, or single parts: just test lint engine
test *parts:
    ./scripts/test {{parts}}

# Run checks and tests without services
quick *parts:
    ./scripts/test --quick {{parts}}

# Measure the speed of a release build against the baseline
bench *arguments:
    cargo run --release -p toolcrib-bench -- {{arguments}}

# Check formatting, clippy, rustdoc, spelling and dependencies
lint:
    ./scripts/test lint

# Build the API documentation of the crates, target/doc
docs:
    cargo doc --workspace --lib --no-deps

# Start the server: just run serve --listen 127.0.0.1:8090
run *arguments:
    cargo run --release -- {{arguments}}

# Build from nothing and report time, CPU time and size: just build-report --check
build-report *arguments:
    ./scripts/build-report {{arguments}}
