//! Finds the name of a place in a question about the weather. Pure.
//!
//! The typical words of such questions are removed from both ends; the place is what remains in the
//! middle. Everything after the last leading "in", "for" or "near" belongs to the place, so that
//! Hot Springs and The Hague keep their names.

/// The parsed question.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaceQuery {
    /// The place, as it was named.
    pub name: String,
    /// `true` if the question is about another time than now.
    pub asks_other_time: bool,
}

/// A place's name and the regions it is in.
#[derive(Debug, Clone, PartialEq)]
pub struct PlaceInRegion {
    pub name: String,
    pub regions: Vec<String>,
    /// `true` if the question itself marks the end of the name.
    pub has_explicit_region: bool,
}

/// Maximum length of a place's name in characters.
const MAX_NAME: usize = 100;

/// Words that stand right before a place.
const BEFORE: &[&str] = &["in", "for", "at", "near", "around", "of", "from", "over", "en", "à"];

/// Words of which questions consist.
#[rustfmt::skip]
const QUESTION: &[&str] = &[
    "weather", "forecast", "temperature", "temperatures", "temp", "climate", "conditions",
    "condition", "report", "humidity", "wind", "what", "what's", "whats", "what’s", "how", "how's",
    "hows", "how’s", "is", "it", "it's", "are", "there", "will", "be", "do", "does", "i", "we",
    "need", "an", "a", "umbrella", "jacket", "coat", "tell", "me", "show", "give", "get", "check",
    "find", "know", "about", "can", "could", "would", "you", "please", "thanks", "hi", "hey",
    "hello", "today", "today's", "now", "right", "current", "currently", "tomorrow", "tonight",
    "tomorrow's", "yesterday", "outside", "raining", "snowing", "degrees", "celsius", "fahrenheit",
    "feel", "feels", "look", "looks", "looking", "to", "going", "and", "this", "next", "week",
    "weekend", "morning", "afternoon", "evening", "night", "day", "days", "moment", "here", "my",
    "location", "city", "should", "wear", "much", "latest", "live", "local", "query", "place",
    "clima", "tiempo", "météo", "meteo", "wetter", "with", "on", "during", "was", "like",
];

/// Words of questions that also begin names: The Hague, Hot Springs, Snow Hill.
#[rustfmt::skip]
const EITHER: &[&str] = &[
    "the", "hot", "cold", "warm", "cool", "humid", "windy", "rain", "rainy", "snow", "snowy",
    "sunny", "cloudy", "wet", "dry",
];

/// Words of questions in Chinese and Japanese, with longer words before their prefixes.
#[rustfmt::skip]
const CHINESE: &[&str] = &[
    "天气预报", "天氣預報", "天气", "天氣", "天気", "气温", "氣溫", "温度", "溫度", "多少度", "几度",
    "怎么样", "怎麼樣", "怎样", "如何", "查询", "查一下", "请问", "請問", "告诉我", "今天", "今日",
    "现在", "現在", "明天", "明日", "后天", "後天", "昨天", "目前", "当前", "本周", "下周", "周末",
    "帮我", "看看", "一下", "冷不冷", "热不热", "下雨", "会不会", "冷吗", "热吗", "吗", "呢", "的",
    "の", "は", "教えて", "是",
];

/// Words that indicate another time than now.
#[rustfmt::skip]
const ANOTHER_TIME: &[&str] = &[
    "tomorrow", "yesterday", "next", "week", "weekend", "days", "forecast", "明天", "明日", "后天",
    "後天", "昨天", "本周", "下周", "周末", "预报", "預報",
];

/// Returns the place that a question names, if it names one.
pub fn parse_place_query(question: &str) -> Option<PlaceQuery> {
    let lower = question.to_lowercase();
    let another_time = ANOTHER_TIME.iter().any(|word| match word.is_ascii() {
        true => lower.split(|c: char| !c.is_alphanumeric()).any(|part| part == *word),
        false => lower.contains(word),
    });
    let name = match question.chars().any(is_chinese) {
        true => strip_question_words(&strip_cjk_question(question)),
        false => strip_question_words(question),
    };
    let fits = !name.is_empty() && name.chars().count() <= MAX_NAME;
    (fits && name.chars().any(char::is_alphanumeric))
        .then_some(PlaceQuery { name, asks_other_time: another_time })
}

impl PlaceQuery {
    /// Splits the region from the place, as in "Paris, France" and "Portland Oregon".
    pub fn split_region(&self) -> Option<PlaceInRegion> {
        let mut parts = self.name.split([',', '，']).map(|part| part.trim().to_owned());
        let name = parts.next().filter(|name| !name.is_empty())?;
        let within: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
        if name != self.name {
            return Some(PlaceInRegion { name, regions: within, has_explicit_region: true });
        }
        let (name, last) = self.name.rsplit_once(' ')?;
        Some(PlaceInRegion {
            name: name.trim().to_owned(),
            regions: vec![last.to_owned()],
            has_explicit_region: false,
        })
    }
}

/// Normalizes a name for comparison: lowercase, letters and digits only.
pub fn normalize_name(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

fn is_chinese(c: char) -> bool {
    matches!(c, '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{9fff}')
}

fn strip_cjk_question(question: &str) -> String {
    let mut text = question.to_owned();
    for word in CHINESE {
        text = text.replace(word, " ");
    }
    let marks = |c: char| c.is_whitespace() || "?？!！。.,，、:：\"“”「」'".contains(c);
    text.split(marks).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

fn strip_question_words(question: &str) -> String {
    let words: Vec<&str> = question.split_whitespace().collect();
    let (mut from, mut index) = (0, 0);
    // Skips the leading words of the question, and records the position after the last "in".
    let mut after_before = None;
    while index < words.len() && is_question_word(&words, index) {
        index += 1;
        if contains_word(BEFORE, words[index - 1]) {
            after_before = Some(index);
        } else if after_before.is_none() || is_time_word(&words, index - 1) {
            from = index;
        }
    }
    if let Some(start) = after_before {
        from = from.max(start);
    }
    let mut to = words.len();
    while to > from && is_question_word(&words[..to], to - 1) {
        to -= 1;
    }
    let name = words[from..to].join(" ");
    let marks = |c: char| !c.is_alphanumeric() && c != '(';
    let name = name.trim_matches(marks);
    // "Tokyo's weather"; but "weather in St. John's".
    let owner = after_before.is_none() && to < words.len();
    let name = match name.strip_suffix("'s").or(name.strip_suffix("’s")) {
        Some(short) if owner => short,
        _ => name,
    };
    name.to_owned()
}

/// Returns `true` if a word belongs to the question and not to the place.
fn is_question_word(words: &[&str], index: usize) -> bool {
    let word = normalize_word(words[index]);
    if word.is_empty()
        || contains_word(QUESTION, words[index])
        || contains_word(BEFORE, words[index])
    {
        return true;
    }
    if word.len() <= 2 && word.bytes().all(|b| b.is_ascii_digit()) {
        return true;
    }
    if !contains_word(EITHER, words[index]) {
        return false;
    }
    // "Hot Springs", but "How hot is Paris" and "Is it hot Paris".
    let capital = |word: &str| word.chars().next().is_some_and(char::is_uppercase);
    let next = words.get(index + 1);
    let begins_a_name = next.is_some_and(|next| {
        capital(next) && !contains_word(QUESTION, next) && capital(words[index])
    });
    !begins_a_name
}

/// Returns `true` for a word of time, as in "at the moment", "in the morning" or "for the next 3
/// days": there the preposition does not introduce a place.
fn is_time_word(words: &[&str], index: usize) -> bool {
    let times = [
        "moment",
        "morning",
        "afternoon",
        "evening",
        "night",
        "week",
        "weekend",
        "day",
        "days",
        "today",
        "tomorrow",
        "tonight",
        "now",
        "yesterday",
        "me",
    ];
    contains_word(&times, words[index])
}

fn contains_word(list: &[&str], word: &str) -> bool {
    list.contains(&normalize_word(word).as_str())
}

fn normalize_word(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase()
}

/// Expands the abbreviation of a country or state.
pub fn expand_abbreviation(name: &str) -> &str {
    let short = normalize_name(name);
    LONG.iter().find(|(code, _)| *code == short).map_or(name, |(_, long)| long)
}

/// Common abbreviations that the service does not return. It returns country codes itself.
#[rustfmt::skip]
const LONG: &[(&str, &str)] = &[
    ("usa", "United States"), ("america", "United States"), ("uk", "United Kingdom"),
    ("britain", "United Kingdom"), ("greatbritain", "United Kingdom"),
    ("uae", "United Arab Emirates"), ("holland", "Netherlands"), ("korea", "South Korea"),
    ("prc", "China"), ("czechrepublic", "Czechia"),
    ("al", "Alabama"), ("ak", "Alaska"), ("az", "Arizona"), ("ar", "Arkansas"),
    ("ca", "California"), ("co", "Colorado"), ("ct", "Connecticut"), ("de", "Delaware"),
    ("dc", "District of Columbia"), ("fl", "Florida"), ("ga", "Georgia"), ("hi", "Hawaii"),
    ("id", "Idaho"), ("il", "Illinois"), ("in", "Indiana"), ("ia", "Iowa"), ("ks", "Kansas"),
    ("ky", "Kentucky"), ("la", "Louisiana"), ("me", "Maine"), ("md", "Maryland"),
    ("ma", "Massachusetts"), ("mi", "Michigan"), ("mn", "Minnesota"), ("ms", "Mississippi"),
    ("mo", "Missouri"), ("mt", "Montana"), ("ne", "Nebraska"), ("nv", "Nevada"),
    ("nh", "New Hampshire"), ("nj", "New Jersey"), ("nm", "New Mexico"), ("ny", "New York"),
    ("nc", "North Carolina"), ("nd", "North Dakota"), ("oh", "Ohio"), ("ok", "Oklahoma"),
    ("or", "Oregon"), ("pa", "Pennsylvania"), ("ri", "Rhode Island"), ("sc", "South Carolina"),
    ("sd", "South Dakota"), ("tn", "Tennessee"), ("tx", "Texas"), ("ut", "Utah"),
    ("vt", "Vermont"), ("va", "Virginia"), ("wa", "Washington"), ("wv", "West Virginia"),
    ("wi", "Wisconsin"), ("wy", "Wyoming"), ("on", "Ontario"), ("bc", "British Columbia"),
    ("qc", "Quebec"), ("ab", "Alberta"), ("nsw", "New South Wales"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn name(question: &str) -> String {
        parse_place_query(question).map_or_else(String::new, |place| place.name)
    }

    #[rustfmt::skip]
    const QUESTIONS: &[(&str, &str)] = &[
        ("Beijing", "Beijing"),
        ("beijing", "beijing"),
        ("weather in Beijing", "Beijing"),
        ("Beijing weather", "Beijing"),
        ("Beijing Weather?", "Beijing"),
        ("Weather: Rome", "Rome"),
        ("what's the weather like in New York today?", "New York"),
        ("What is the weather in new york right now", "new york"),
        ("what’s the weather in London?", "London"),
        ("How warm is it in São Paulo right now", "São Paulo"),
        ("weather for Paris, France", "Paris, France"),
        ("Paris, France weather today", "Paris, France"),
        ("Is it raining in Seattle, WA?", "Seattle, WA"),
        ("Will it snow in Denver tomorrow?", "Denver"),
        ("Do I need an umbrella in London today?", "London"),
        ("temperature Berlin", "Berlin"),
        ("current temperature in Berlin please", "Berlin"),
        ("Tokyo's weather", "Tokyo"),
        ("How's the weather at the moment in Oslo", "Oslo"),
        ("How is the weather in Oslo at the moment?", "Oslo"),
        ("Weather forecast for the next 3 days in Madrid", "Madrid"),
        ("Weather in Madrid for the next 3 days", "Madrid"),
        ("Rome forecast for tomorrow", "Rome"),
        ("forecast for tomorrow in Rome", "Rome"),
        ("Can you tell me how hot it is in Phoenix, Arizona?", "Phoenix, Arizona"),
        ("please show me the weather for Rio de Janeiro", "Rio de Janeiro"),
        ("weather in The Hague", "The Hague"),
        ("The Hague weather", "The Hague"),
        ("weather in Hot Springs", "Hot Springs"),
        ("Hot Springs weather", "Hot Springs"),
        ("how hot is Paris", "Paris"),
        ("is it cold in Cold Lake", "Cold Lake"),
        ("Isle of Man weather", "Isle of Man"),
        ("weather in the Isle of Man", "the Isle of Man"),
        ("Weatherford weather", "Weatherford"),
        ("weather in \"Nice\"", "Nice"),
        ("weather in Stratford-upon-Avon", "Stratford-upon-Avon"),
        ("what should I wear in Reykjavík this weekend?", "Reykjavík"),
        ("  weather   in    Lima  ", "Lima"),
        ("london,uk", "london,uk"),
        ("weather in St. John's", "St. John's"),
        ("today in Lagos", "Lagos"),
        ("Weather in Washington, D.C.", "Washington, D.C"),
        ("clima en Madrid", "Madrid"),
        ("Wetter in München", "München"),
        ("Погода", "Погода"),
        ("北京天气", "北京"),
        ("天气 上海", "上海"),
        ("今天北京的天气怎么样？", "北京"),
        ("请问广州现在几度", "广州"),
        ("深圳明天天气预报", "深圳"),
        ("東京の天気は", "東京"),
        ("台北今天下雨吗", "台北"),
        ("weather in 上海", "上海"),
        ("", ""),
        ("weather", ""),
        ("what's the weather like?", ""),
        ("how hot is it right now", ""),
        ("天气", ""),
        ("今天天气怎么样", ""),
        ("weather in", ""),
        ("?!", ""),
        ("weather here today", ""),
    ];

    #[test]
    fn places_are_found_in_questions() {
        for (question, expected) in QUESTIONS {
            assert_eq!(name(question), *expected, "{question}");
        }
        assert_eq!(name(&format!("weather in {}", "x".repeat(200))), "");
    }

    #[test]
    fn questions_about_other_times_are_recognized() {
        for other in ["Rome tomorrow", "weather in Rome next week", "北京明天天气"] {
            assert!(parse_place_query(other).unwrap().asks_other_time, "{other}");
        }
        for now in ["Rome", "weather in Rome today", "北京今天天气", "Weekapaug"] {
            assert!(!parse_place_query(now).unwrap().asks_other_time, "{now}");
        }
    }

    #[test]
    fn a_place_is_split_into_name_and_regions() {
        let split =
            |question: &str| parse_place_query(question).and_then(|place| place.split_region());
        let france = split("weather in Paris, France").unwrap();
        assert_eq!((france.name.as_str(), france.has_explicit_region), ("Paris", true));
        assert_eq!(france.regions, ["France"]);
        assert_eq!(split("Springfield, Sangamon, IL").unwrap().regions, ["Sangamon", "IL"]);
        let oregon = split("Portland Oregon").unwrap();
        assert_eq!((oregon.name.as_str(), oregon.has_explicit_region), ("Portland", false));
        assert_eq!(split("Rome"), None);
        assert_eq!(expand_abbreviation("TX"), "Texas");
        assert_eq!(expand_abbreviation("U.S.A."), "United States");
        assert_eq!(expand_abbreviation("France"), "France");
    }
}
