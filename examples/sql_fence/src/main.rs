fn main() {
    println!("{}", rusqlite::version());
}
