//! Measures lockstream beside libraries of other languages: see `peers/README.md`.

fn main() -> std::process::ExitCode {
    lockstream_bench::compare()
}
