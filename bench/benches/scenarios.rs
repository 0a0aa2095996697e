//! `cargo bench -p lockstream-bench --bench scenarios -- --help`

fn main() -> std::process::ExitCode {
    lockstream_bench::main()
}
