# Every line also runs without just.

# format and lint
check:
    scripts/test fmt clippy

# before a commit: format, lints and the tests that need no server
quick:
    scripts/test quick

# everything: installs, starts, tests and stops what it needs
test *PARTS:
    scripts/test {{PARTS}}

# the servers for tests and for trying things
services-up *NAMES:
    scripts/services up {{NAMES}}

services-down *NAMES:
    scripts/services down {{NAMES}}

services-status:
    scripts/services status

# side by side with what one would write instead
bench *ARGS="all":
    cargo run --release -p hapax-bench -- {{ARGS}}

# looks for rare faults, for long: models, crashes and races again and again, on real servers
torture *ARGS:
    scripts/torture {{ARGS}}

# a command beside busy loops and a disk that is written all the time
hogs *COMMAND:
    scripts/hogs {{COMMAND}}

# the parsers of outside bytes
fuzz *ARGS:
    scripts/fuzz {{ARGS}}

# scripts/test in a new, minimal Debian; needs root
fresh *PARTS:
    scripts/fresh {{PARTS}}

# the pictures of docs/page.md, from what the last `just test page` saw
pictures:
    scripts/pictures

docs:
    cargo doc --no-deps --workspace --all-features --open
