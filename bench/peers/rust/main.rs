//! One library in one role: see `../README.md`. The libraries and the roles are in `../../src`: `libs` and `peer.rs`.

fn main() {
    lockstream_bench::peer(std::env::args().skip(1).collect());
}
