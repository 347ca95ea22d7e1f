//! Object stores for tests: a directory of its own, or a prefix of its own on the S3 server.

use std::sync::Arc;
use std::time::Duration;

use hapax::backend::object::{
    AllocatorSettings, Directory, ObjectJournal, ObjectSettings, Objects, S3, S3Settings,
};

/// Where a journal of a test lies, as a word that a child process understands.
#[derive(Clone)]
pub struct Place {
    pub word: String,
    _directory: Option<Arc<tempfile::TempDir>>,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: eval \"$(scripts/services env)\" after scripts/services up s3")
    })
}

/// The bucket of the tests.
pub fn s3_settings() -> S3Settings {
    let mut settings = S3Settings::new(
        variable("HAPAX_TEST_S3_BUCKET"),
        variable("HAPAX_TEST_S3_ACCESS_KEY_ID"),
        variable("HAPAX_TEST_S3_SECRET_ACCESS_KEY"),
    );
    settings.endpoint = Some(variable("HAPAX_TEST_S3_ENDPOINT"));
    settings.skew = Duration::from_millis(20); // one machine, one clock
    settings
}

impl Place {
    pub fn directory() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Place { word: format!("dir:{}", directory.path().display()), _directory: Some(Arc::new(directory)) }
    }

    pub fn s3() -> Self {
        Place { word: format!("s3:{}", uuid::Uuid::new_v4().simple()), _directory: None }
    }

    pub fn of(word: &str) -> Self {
        Place { word: word.to_owned(), _directory: None }
    }

    pub async fn objects(&self) -> Arc<dyn Objects> {
        match self.word.split_once(':') {
            Some(("dir", path)) => Arc::new(Directory::open(path).unwrap()),
            Some(("s3", prefix)) => {
                let mut settings = s3_settings();
                settings.prefix = format!("tests/{prefix}");
                Arc::new(S3::connect(settings).await.unwrap())
            }
            _ => panic!("{} is no place", self.word),
        }
    }

    pub async fn open(&self) -> ObjectJournal {
        self.open_with(AllocatorSettings::default()).await
    }

    pub async fn open_with(&self, allocator: AllocatorSettings) -> ObjectJournal {
        let mut settings = ObjectSettings::default();
        settings.allocator = allocator;
        settings.grace = Duration::from_secs(1);
        ObjectJournal::open(self.objects().await, settings).await.unwrap()
    }
}
