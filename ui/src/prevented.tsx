// What would have happened without hapax: effects that were not done twice.
import type { Overview } from "./api";
import { Empty, number } from "./text";

const LAYERS: [string, string, string][] = [
  ["keys", "keyed write answered with the first answer", "keyed writes answered with the first answer"],
  ["window", "delivery that the window knew", "deliveries that the window knew"],
  ["claims", "delivery that the ledger knew", "deliveries that the ledger knew"],
];

export function Prevented({ data: { prevented } }: { data: Overview }) {
  if (!prevented) return null;
  const { count, layers, valued, value, since } = prevented;
  return (
    <>
      <h2>Not done twice</h2>
      {count === 0 ? (
        <Empty title={`No effect had to be kept from being done twice since ${since}.`}>
          <p>Whatever is delivered or sent again, and was done before, is counted here.</p>
        </Empty>
      ) : (
        <p>
          Since {since} (UTC), without hapax <strong class="number">{number(count)}</strong> {count === 1 ? "effect" : "effects"} would have been done again
          {valued > 0 && <>, worth <strong class="number">{value}</strong>{valued < count && ` (${number(valued)} of them have a value)`}</>}:{" "}
          {LAYERS.filter(([layer]) => layers[layer]).map(([layer, one, several]) => `${number(layers[layer])} ${layers[layer] === 1 ? one : several}`).join(", ")}.
        </p>
      )}
    </>
  );
}
