use futures::FutureExt;
use proptest::prelude::*;
use redis::cmd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};

use super::*;

impl<T> Link<T> {
    /// What has come already.
    fn ready(&mut self) -> Option<Result<Event<T>, Fault>> {
        self.next().now_or_never()
    }

    /// The tags of the requests that are not answered yet.
    fn tags(&self) -> impl Iterator<Item = &T> {
        self.sent.iter().filter_map(|sent| match &sent.purpose {
            Purpose::Request(tag) => Some(tag),
            _ => None,
        })
    }
}

const BOUND: Duration = Duration::from_secs(5);

/// A link, and the server's end of it.
fn pair<T>() -> (Link<T>, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    (over(Box::pin(ours)), theirs)
}

fn over<T>(stream: Pin<Box<dyn Stream>>) -> Link<T> {
    Link::new(stream, None, "a:1".into(), BOUND)
}

fn ping() -> Cmd {
    cmd("PING")
}

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

async fn hear_ping(server: &mut DuplexStream) {
    let mut heard = vec![0; PING.len()];
    server.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard, PING);
}

async fn event<T>(link: &mut Link<T>) -> Event<T> {
    let event = timeout(BOUND, link.next()).await.expect("an event");
    event.unwrap_or_else(|fault| panic!("{fault}"))
}

async fn reply<T>(link: &mut Link<T>) -> (T, Value) {
    match event(link).await {
        Event::Reply(tag, _, reply) => (tag, reply),
        Event::Push(push) => panic!("{push:?}"),
    }
}

async fn fault<T>(link: &mut Link<T>) -> Fault {
    match timeout(BOUND, link.next()).await.expect("an end") {
        Ok(_) => panic!("no fault"),
        Err(fault) => fault,
    }
}

fn simple(text: &str) -> Value {
    Value::SimpleString(text.into())
}

#[tokio::test]
async fn o2_requests_are_written_in_order_and_answered_in_order() {
    let (mut link, mut server) = pair();
    let now = Instant::now();
    for number in 0..200_i64 {
        link.send(number, now, cmd("ECHO").arg(number));
    }
    link.send_aside(&ping());
    link.send(200, now, &ping());
    assert!(link.ready().is_none());
    let mut heard = Vec::new();
    let expected: Vec<u8> = (0..200_i64)
        .flat_map(|number| cmd("ECHO").arg(number).get_packed_command())
        .chain(PING.repeat(2))
        .collect();
    heard.resize(expected.len(), 0);
    server.read_exact(&mut heard).await.unwrap();
    assert_eq!(heard, expected);
    for number in 0..202 {
        let answer = format!(":{number}\r\n");
        server.write_all(answer.as_bytes()).await.unwrap();
    }
    for number in 0..200 {
        assert_eq!(reply(&mut link).await, (number, Value::Int(number)));
    }
    assert_eq!(link.tags().collect::<Vec<_>>(), [&200]);
    assert_eq!(reply(&mut link).await, (200, Value::Int(201)));
    assert!(link.is_quiet());
}

/// A server that reads slowly takes a request in pieces.
#[tokio::test]
async fn a_request_is_written_in_pieces() {
    let (ours, mut server) = tokio::io::duplex(7);
    let mut link = over(Box::pin(ours));
    link.send((), Instant::now(), &ping());
    let serving = tokio::spawn(async move {
        hear_ping(&mut server).await;
        server.write_all(b"+PONG\r\n").await.unwrap();
        server
    });
    assert_eq!(reply(&mut link).await.1, simple("PONG"));
    serving.await.unwrap();
}

/// Another library shifted all replies by one.
#[tokio::test]
async fn a_push_is_no_reply_unless_it_confirms_what_was_asked() {
    let (mut link, mut server) = pair();
    let now = Instant::now();
    link.send("call", now, &ping());
    link.send("subscribe", now, cmd("SSUBSCRIBE").arg("ours"));
    link.send("again", now, &ping());
    let said: [&[u8]; 7] = [
        b">3\r\n$12\r\nsunsubscribe\r\n$4\r\nours\r\n:0\r\n",
        b"+one\r\n",
        b">3\r\n$10\r\nssubscribe\r\n$6\r\ntheirs\r\n:1\r\n",
        b">3\r\n$8\r\nsmessage\r\n$4\r\nours\r\n$1\r\nx\r\n",
        b">3\r\n$10\r\nssubscribe\r\n$4\r\nours\r\n:1\r\n",
        b">3\r\n$10\r\nssubscribe\r\n$4\r\nours\r\n:1\r\n",
        b"-ERR two\r\n",
    ];
    server.write_all(&said.concat()).await.unwrap();
    let mut events = Vec::new();
    while events.len() < said.len() {
        events.push(match event(&mut link).await {
            Event::Push(push) => format!("{:?}", push.kind),
            Event::Reply(tag, _, Value::Push { .. }) => format!("{tag} is done"),
            Event::Reply(tag, _, Value::ServerError(_)) => format!("{tag} is refused"),
            Event::Reply(tag, ..) => tag.to_owned(),
        });
    }
    assert_eq!(
        events,
        [
            "SUnsubscribe",
            "call",
            "SSubscribe",
            "SMessage",
            "subscribe is done",
            "SSubscribe",
            "again is refused"
        ]
    );
}

/// A slot moves away while the unsubscription is under way: the server says so unasked, and refuses the unsubscription.
/// The refusal would pass for the reply to the call behind it, and that would be sent to another node once more.
#[tokio::test]
async fn a_refused_unsubscription_is_not_taken_for_a_refused_call() {
    let unsubscribed: &[u8] = b">3\r\n$12\r\nsunsubscribe\r\n$4\r\nours\r\n:0\r\n";
    let moved: &[u8] = b"-MOVED 5 h:1\r\n";
    let (pong, no_right): (&[u8], &[u8]) = (b"+PONG\r\n", b"-NOPERM no right to ping\r\n");
    for (said, is_fault) in [
        ([unsubscribed, moved, pong, b"+OK\r\n"], true),
        ([unsubscribed, pong, moved, b""], false),
        ([unsubscribed, no_right, moved, b""], false),
        ([moved, pong, b"+OK\r\n", b""], false),
    ] {
        let (mut link, mut server) = pair();
        let now = Instant::now();
        link.send("unsubscribe", now, cmd("SUNSUBSCRIBE").arg("ours"));
        link.send("call", now, &ping());
        server.write_all(&said.concat()).await.unwrap();
        assert_eq!(reply(&mut link).await.0, "unsubscribe");
        if is_fault {
            let fault = fault(&mut link).await;
            assert!(matches!(fault, Fault::Garbled { .. }), "{fault}");
        } else {
            assert_eq!(reply(&mut link).await.0, "call");
        }
    }
}

/// What is written is not kept until all is written, which may be never.
#[tokio::test]
async fn what_is_written_to_a_slow_server_is_not_kept() {
    let (ours, mut server) = tokio::io::duplex(1 << 10);
    let mut link = over(Box::pin(ours));
    let long = cmd("ECHO").arg(vec![b'x'; 4 << 10]).take();
    let mut read = vec![0; 4 << 10];
    let writing = async {
        for number in 0..1_000 {
            link.send(number, Instant::now(), &long);
            while link.outgoing.len() > 4 << 10 {
                assert!(link.ready().is_none());
                let taken = server.read(&mut read).await.unwrap();
                assert!(taken > 0);
            }
            assert!(link.outgoing.len() <= 16 << 10, "{}", link.outgoing.len());
        }
    };
    // Without tokio's budget, at whose end neither would go on.
    tokio::task::unconstrained(writing).await;
}

#[tokio::test]
async fn a_reply_to_no_request_ends_the_connection() {
    let (mut link, mut server) = pair::<()>();
    server.write_all(b"+OK\r\n").await.unwrap();
    let fault = fault(&mut link).await;
    assert!(matches!(fault, Fault::Garbled { .. }), "{fault}");
}

#[tokio::test]
async fn pushes_that_come_while_something_is_asked_are_events_later() {
    let (mut link, mut server) = pair::<()>();
    let push: &[u8] = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n";
    server
        .write_all(&[push, b"+PONG\r\n", push].concat())
        .await
        .unwrap();
    let answer = link.ask(&ping(), BOUND).await;
    assert_eq!(answer.unwrap(), simple("PONG"));
    for _ in 0..2 {
        assert!(matches!(event(&mut link).await, Event::Push(_)));
    }
    assert!(link.ready().is_none());
}

/// Two notices of one key, say, of which the first came while something else was asked.
#[tokio::test]
async fn pushes_that_are_put_back_keep_their_order() {
    let (mut link, mut server) = pair::<()>();
    let push = |payload: &str| format!(">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n{payload}\r\n");
    let said = [
        push("1"),
        push("2"),
        push("3"),
        "+PONG\r\n".to_owned(),
        push("4"),
    ];
    server.write_all(said.concat().as_bytes()).await.unwrap();
    link.ask(&ping(), BOUND).await.unwrap();
    let mut taken = Vec::new();
    for _ in 0..2 {
        match event(&mut link).await {
            Event::Push(push) => taken.push(push),
            Event::Reply(..) => panic!("nothing was asked"),
        }
    }
    link.put_back(taken);
    for payload in ["1", "2", "3", "4"] {
        let Event::Push(push) = event(&mut link).await else {
            panic!("nothing was asked");
        };
        assert_eq!(push.data[1], Value::BulkString(payload.into()));
    }
}

/// A connection that ended with the last step of its setup would pass for one that stands.
#[tokio::test]
async fn an_end_that_came_with_an_answer_is_seen_later() {
    let (mut link, mut server) = pair::<()>();
    tokio::spawn(async move {
        hear_ping(&mut server).await;
        server.write_all(b"+PONG\r\n").await.unwrap();
    });
    let answer = link.ask(&ping(), BOUND).await;
    assert_eq!(answer.unwrap(), simple("PONG"));
    for _ in 0..2 {
        let ended = timeout(BOUND, poll_fn(|cx| link.poll_ended(cx)));
        ended.await.expect("it ended, and still has");
    }
}

/// What the server said before it went counts, though nothing can be written any more.
#[tokio::test]
async fn what_came_before_the_end_is_read_when_nothing_can_be_written() {
    let (mut link, mut server) = pair();
    link.send("first", Instant::now(), &ping());
    assert!(link.ready().is_none());
    hear_ping(&mut server).await;
    server.write_all(b"+PONG\r\n").await.unwrap();
    drop(server);
    link.send("second", Instant::now(), &ping());
    assert_eq!(reply(&mut link).await, ("first", simple("PONG")));
    assert!(matches!(
        fault(&mut link).await,
        Fault::Broken { .. } | Fault::Closed { .. }
    ));
}

#[tokio::test]
async fn a_question_errs_when_the_connection_ends_or_nothing_comes() {
    let (mut link, mut server) = pair::<()>();
    let silent = link.ask(&ping(), Duration::from_millis(1)).await;
    assert!(matches!(silent, Err(Fault::Silent { .. })), "{silent:?}");
    tokio::spawn(async move { hear_ping(&mut server).await });
    for _ in 0..2 {
        let ping = ping();
        let asking = link.ask(&ping, BOUND * 2);
        let ended = timeout(BOUND, asking).await.expect("it errs");
        assert!(
            matches!(ended, Err(Fault::Closed { .. } | Fault::Broken { .. })),
            "{ended:?}"
        );
    }
}

/// The answer to a question that nobody waits for any more is not taken for that of the next.
#[tokio::test]
async fn an_answer_that_comes_too_late_is_no_answer_to_the_next_question() {
    let (mut link, mut server) = pair::<()>();
    let silent = link.ask(&ping(), Duration::from_millis(1)).await;
    assert!(matches!(silent, Err(Fault::Silent { .. })), "{silent:?}");
    server.write_all(b"+late\r\n+PONG\r\n").await.unwrap();
    let answer = link.ask(&ping(), BOUND).await;
    assert_eq!(answer.unwrap(), simple("PONG"));
}

#[tokio::test(start_paused = true)]
async fn the_oldest_request_is_answered_in_time_or_ends_the_connection() {
    let (mut link, mut server) = pair();
    let began = Instant::now();
    link.send(1, began, &ping());
    tokio::time::sleep(BOUND / 2).await;
    link.send(2, Instant::now(), &ping());
    server.write_all(b"+one\r\n").await.unwrap();
    assert_eq!(reply(&mut link).await, (1, simple("one")));
    let Err(fault) = link.next().await else {
        panic!("nothing has come");
    };
    assert!(matches!(fault, Fault::Silent { .. }), "{fault}");
    assert_eq!(began.elapsed(), BOUND / 2 + BOUND);
}

/// The alarm of an earlier request is late then. To put it off would wake the runtime twice for nothing.
#[tokio::test]
async fn an_alarm_that_was_over_before_a_request_is_set_for_it_at_once() {
    let (mut link, mut server) = pair();
    link.answers_within(Duration::from_millis(1));
    server.write_all(b"+one\r\n").await.unwrap();
    link.send(1, Instant::now(), &ping());
    assert_eq!(reply(&mut link).await, (1, simple("one")));
    tokio::time::sleep(Duration::from_millis(10)).await;
    link.within = BOUND;
    let at = Instant::now();
    link.send(2, at, &ping());
    let _ = link.ready();
    assert_eq!(link.alarm.deadline(), at + BOUND);
}

#[tokio::test]
async fn a_message_has_a_limit_and_many_of_them_have_none() {
    const MESSAGE: usize = 1 << 20;
    let (mut link, mut server) = pair::<usize>();
    for number in 0..32 {
        link.send(number, Instant::now(), &ping());
    }
    let serving = tokio::spawn(async move {
        let long = [
            format!("${MESSAGE}\r\n").into_bytes(),
            vec![b'x'; MESSAGE],
            b"\r\n".to_vec(),
        ];
        for _ in 0..32 {
            server.write_all(&long.concat()).await.unwrap();
        }
        server.write_all(b"$1000000000\r\n").await.unwrap();
        while server.write_all(&long[1]).await.is_ok() {}
    });
    for number in 0..32 {
        assert_eq!(reply(&mut link).await.0, number);
    }
    let fault = fault(&mut link).await;
    assert!(fault.to_string().contains("16 MiB"), "{fault}");
    drop(link);
    serving.await.unwrap();
}

/// Gives its pieces one by one; between two of them nothing is there.
struct Pieces {
    left: VecDeque<Vec<u8>>,
    is_there: bool,
}

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.is_there = !self.is_there;
        if !self.is_there {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(mut piece) = self.left.pop_front() {
            let rest = piece.split_off(piece.len().min(buffer.remaining()));
            buffer.put_slice(&piece);
            if !rest.is_empty() {
                self.left.push_front(rest);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Everything that is read until the end, and why it ended.
fn read_all(bytes: &[u8], cuts: &[usize]) -> (Vec<Value>, Fault) {
    let mut left = VecDeque::new();
    let mut rest = bytes;
    for cut in cuts {
        let (piece, after) = rest.split_at((*cut).clamp(1, rest.len().max(1)).min(rest.len()));
        if !piece.is_empty() {
            left.push_back(piece.to_vec());
        }
        rest = after;
    }
    if !rest.is_empty() {
        left.push_back(rest.to_vec());
    }
    let is_there = false;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut link = over(Box::pin(Pieces { left, is_there }));
        // More than there can be replies.
        for number in 0..=bytes.len() {
            link.send(number, Instant::now(), &ping());
        }
        let mut read = Vec::new();
        loop {
            match link.next().await {
                Ok(Event::Reply(number, _, value)) => {
                    let replies = read.iter().filter(|it| !matches!(it, Value::Push { .. }));
                    assert_eq!(number, replies.count());
                    read.push(value);
                }
                Ok(Event::Push(PushInfo { kind, data })) => read.push(Value::Push { kind, data }),
                Err(fault) => return (read, fault),
            }
        }
    })
}

/// A message, and its bytes.
fn message() -> impl Strategy<Value = (Value, Vec<u8>)> {
    let int = any::<i64>().prop_map(|int| (Value::Int(int), format!(":{int}\r\n").into_bytes()));
    let bulk = prop::collection::vec(any::<u8>(), 0..40).prop_map(|bytes| {
        let head = format!("${}\r\n", bytes.len()).into_bytes();
        let encoded = [&head[..], &bytes, b"\r\n"].concat();
        (Value::BulkString(bytes), encoded)
    });
    let text = "[a-z ]{0,9}x".prop_map(|text| {
        let encoded = format!("+{text}\r\n").into_bytes();
        (Value::SimpleString(text), encoded)
    });
    let nothing = prop::sample::select(vec!["$-1\r\n", "*-1\r\n", "_\r\n"])
        .prop_map(|bytes| (Value::Nil, bytes.as_bytes().to_vec()));
    let leaf = prop_oneof![int, bulk, text, nothing];
    let nested = leaf.prop_recursive(4, 40, 5, |inner| {
        prop::collection::vec(inner, 0..5).prop_map(|parts| {
            let mut encoded = format!("*{}\r\n", parts.len()).into_bytes();
            let mut values = Vec::new();
            for (value, bytes) in parts {
                values.push(value);
                encoded.extend(bytes);
            }
            (Value::Array(values), encoded)
        })
    });
    let push = "[a-z]{1,9}".prop_map(|payload| {
        let length = payload.len();
        let encoded = format!(">3\r\n+message\r\n+c\r\n${length}\r\n{payload}\r\n").into_bytes();
        let data = vec![
            Value::SimpleString("c".into()),
            Value::BulkString(payload.into_bytes()),
        ];
        let kind = PushKind::Message;
        (Value::Push { kind, data }, encoded)
    });
    prop_oneof![4 => nested, 1 => push]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn messages_are_the_same_wherever_the_stream_is_cut(
        messages in prop::collection::vec(message(), 0..12),
        cuts in prop::collection::vec(1..30_usize, 0..40),
        end in any::<prop::sample::Index>(),
    ) {
        let (values, encoded): (Vec<_>, Vec<_>) = messages.into_iter().unzip();
        let bytes = encoded.concat();
        // The last messages are missing, and a part of one.
        let end = end.index(bytes.len() + 1);
        let mut complete = 0;
        let mut reached = 0;
        for one in &encoded {
            reached += one.len();
            complete += usize::from(reached <= end);
        }
        let (read, fault) = read_all(&bytes[..end], &cuts);
        prop_assert_eq!(&read[..], &values[..complete]);
        prop_assert!(matches!(fault, Fault::Closed { .. }), "{}", fault);
    }

    #[test]
    fn a_garbled_stream_ends_in_an_error_after_the_same_answers(
        messages in prop::collection::vec(message(), 1..8),
        cuts in prop::collection::vec(1..30_usize, 0..20),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let (values, encoded): (Vec<_>, Vec<_>) = messages.into_iter().unzip();
        let mut bytes = encoded.concat();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let mut whole = 0;
        let mut reached = 0;
        for one in &encoded {
            reached += one.len();
            whole += usize::from(reached <= at);
        }
        let (read, _) = read_all(&bytes, &cuts);
        let (at_once, _) = read_all(&bytes, &[]);
        prop_assert!(read.len() >= whole, "{read:?}");
        prop_assert_eq!(&read[..whole], &values[..whole]);
        prop_assert_eq!(read, at_once);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), cuts in prop::collection::vec(1..9_usize, 0..20)) {
        read_all(&bytes, &cuts);
    }

    #[test]
    fn nothing_like_resp_panics(text in "([-+:$*%|~>_,#!=(]-?[0-9]{0,3}(\r\n|\r|\n)|[a-z]{0,3}\r\n){0,20}", cuts in prop::collection::vec(1..9_usize, 0..20)) {
        read_all(text.as_bytes(), &cuts);
    }
}

/// The client library's parser passes over such a byte if the stream is cut behind it.
#[test]
fn a_byte_that_cannot_be_where_it_is_ends_the_connection() {
    let bytes = b"*1\r\n\0-1\r\n:1\r\n";
    for cuts in [&[][..], &[5], &[4, 1], &[1; 20]] {
        let (read, fault) = read_all(bytes, cuts);
        assert!(read.is_empty(), "{cuts:?}: {read:?}");
        assert!(matches!(fault, Fault::Broken { .. }), "{fault}");
    }
}

/// A reply that nests without end would take the stack.
#[test]
fn a_reply_may_not_nest_without_end() {
    let (read, fault) = read_all(&b"*1\r\n".repeat(1 << 18), &[]);
    assert!(read.is_empty());
    assert!(matches!(fault, Fault::Broken { .. }), "{fault}");
}

/// A length that no message can have must not reserve memory for it.
#[test]
fn a_length_that_cannot_be_ends_the_connection() {
    for head in [
        "*9223372036854775807\r\n",
        "%9223372036854775807\r\n",
        ">9223372036854775807\r\n",
        "~9223372036854775807\r\n",
        "$9223372036854775807\r\n",
        "|9223372036854775807\r\n",
    ] {
        let (read, _) = read_all(head.as_bytes(), &[]);
        assert!(read.is_empty(), "{head}");
    }
}
