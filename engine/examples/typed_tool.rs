//! Offers a typed function as a tool: its schemas are derived from its types, arguments that do not
//! match are refused before it runs, and its result is stored.
//!
//! `cargo run -p toolcrib --example typed_tool`

use std::fmt::Write;
use toolcrib::calls::Until;

use toolcrib::{CallRequest, Caller, Effect, Engine, FnTool, Risk, Status};

/// Arguments of the tool. The comments become descriptions in the schema.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Trip {
    /// Distance in kilometres.
    km: f64,
    /// Fuel used, in litres.
    litres: f64,
}

/// Result of the tool.
#[derive(serde::Serialize, schemars::JsonSchema)]
struct Consumption {
    litres_per_100_km: f64,
}

async fn consumption(trip: Trip) -> Result<Consumption, String> {
    if trip.km <= 0.0 {
        return Err("km must be greater than 0".to_owned());
    }
    Ok(Consumption { litres_per_100_km: trip.litres / trip.km * 100.0 })
}

/// Calls the tool three times and returns the output.
pub async fn show() -> Result<String, Box<dyn std::error::Error>> {
    let tool =
        FnTool::new("car.consumption", "Computes the fuel consumption of a trip", consumption)
            .effect(Effect::Read)
            .risk(Risk::Low)
            .timeout_ms(2_000);
    let engine = Engine::builder().tool(tool).start().await?;
    let caller = Caller::local("default");

    let mut output = String::new();
    let tool = engine.registry().tool(&caller, "car.consumption")?;
    let schema = tool.definition.input_schema.to_value();
    writeln!(output, "required: {}", schema["required"])?;

    for args in [r#"{"km": 480, "litres": 30}"#, r#"{"km": "far"}"#, r#"{"km": 0, "litres": 1}"#] {
        let ticket = match engine
            .calls()
            .invoke(&caller, CallRequest::new("car.consumption", args)?)
            .await
        {
            Ok(ticket) => ticket,
            Err(refused) => {
                writeln!(output, "refused: {refused}")?;
                continue;
            }
        };
        let call = engine.calls().wait(&caller, &ticket.call.id, Until::Ended).await?;
        let outcome = call.outcome.as_ref().ok_or("an ended call has an outcome")?;
        match (&outcome.data, &outcome.error) {
            (Some(data), _) if call.status == Status::Succeeded => {
                writeln!(output, "answer: {}", data.text())?;
            }
            (_, Some(fault)) => {
                writeln!(output, "failed after {} attempts: {fault}", outcome.metrics.attempts)?;
            }
            _ => writeln!(output, "{}", call.status.as_str())?,
        }
    }
    engine.shut_down(std::time::Duration::from_secs(1)).await;
    Ok(output)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    print!("{}", show().await?);
    Ok(())
}
