//! How does a test get look-ups of names that are slow, or a name with two addresses?

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// `lookup.c` as a library, for the variable `LD_PRELOAD` of another process. What it reads stands in its head.
#[derive(Debug)]
pub struct Lookups {
    library: PathBuf,
    _folder: TempDir,
}

impl Lookups {
    pub fn compile() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let source = folder.path().join("lookup.c");
        std::fs::write(&source, include_str!("lookup.c")).expect("the folder is ours");
        let library = folder.path().join("lookup.so");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .output();
        let compiled = compiled.expect("this test needs a C compiler: `apt-get install gcc`");
        let told = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{told}");
        Self {
            library,
            _folder: folder,
        }
    }

    /// What `LD_PRELOAD` is to be.
    pub fn library(&self) -> &str {
        self.library.to_str().expect("a plain path")
    }
}
