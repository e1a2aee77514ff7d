"use strict";
/* What the page does besides drawing, which is Bokeh's part: choose which bars and points are worth drawing, write
   quantities, fill in the block that is chosen, and switch between light and dark. */

const autopar = (() => {
  const NARROW = 2; // pixels; bars below this are put together with their neighbours
  const MOST_BARS = 15000; // drawn at once; where there are more, wider ones are put together, too
  const MOST_POINTS = 30000; // of all curves
  const PREFIXES = [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];

  const digits = (value) => String(Number(value.toPrecision(4)));

  function seconds(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size >= 1) return digits(value) + " s";
    if (size >= 1e-3) return digits(value * 1e3) + " ms";
    if (size >= 1e-6) return digits(value * 1e6) + " us";
    return digits(value * 1e9) + " ns";
  }

  function bytes(value) {
    for (const [prefix, scale] of PREFIXES) {
      if (Math.abs(value) >= scale) return digits(value / scale) + " " + prefix + "B";
    }
    return digits(value) + " B";
  }

  function count(value) {
    for (const [prefix, scale] of PREFIXES) {
      if (Math.abs(value) >= scale) return digits(value / scale) + " " + prefix;
    }
    return digits(value);
  }

  const percent = (value) => (value > 0 ? "+" : "") + digits(value) + " %";

  /* Return a function whose calls of one frame are one call. */
  function once(draw) {
    let pending = false;
    return () => {
      if (pending) return;
      pending = true;
      requestAnimationFrame(() => {
        pending = false;
        draw();
      });
    };
  }

  let redraw = () => {};
  let curves = null; // memory over time
  let described = null; // what the bars of the timeline are, by the number that the chart has of them

  function lanesOf(source) {
    const { lane, row } = source.data;
    const lanes = [];
    for (let i = 0; i < lane.length; i++) {
      if (i === 0 || lane[i] !== lane[i - 1] || row[i] !== row[i - 1]) {
        lanes.push({ place: lane[i], row: row[i], from: i, to: i });
      }
      lanes[lanes.length - 1].to = i + 1;
    }
    return lanes;
  }

  /* First bar of a lane that ends after `time`; bars of a lane never overlap. */
  function firstAfter(data, lane, time) {
    let low = lane.from;
    let high = lane.to;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.start[middle] + data.seconds[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function drawBars(bars, lanes) {
    const { plot, full, shown, kinds, names, lanes: titles } = bars;
    let narrow = (NARROW * (plot.x_range.end - plot.x_range.start)) / Math.max(1, plot.inner_width);
    let chosen = chooseBars(bars, lanes, narrow);
    while (chosen.found.length > MOST_BARS) {
      narrow *= 2;
      chosen = chooseBars(bars, lanes, narrow);
    }
    described = { found: chosen.found, full, kinds, names, titles };
    chosen.drawn.forEach((data, kind) => (shown[kind].data = data));
  }

  /* Those to be seen, bars shorter than `narrow` seconds put together with such neighbours. */
  function chooseBars({ plot, full, tops, bottoms }, lanes, narrow) {
    const { start: from, end: to } = plot.x_range;
    const found = [];
    const drawn = full.map((source, kind) => {
      const { data } = source;
      // The legend shows a kind as its first bar is: one that is opaque and nowhere.
      const out = { left: [NaN], right: [NaN], top: [NaN], bottom: [NaN], alpha: [1], what: [-1] };
      const put = (lane, left, right, busy, first, count) => {
        out.left.push(left);
        out.right.push(right);
        out.top.push(lane.place + tops[lane.row]);
        out.bottom.push(lane.place + bottoms[lane.row]);
        out.alpha.push(count === 1 ? 1 : Math.max(0.15, Math.min(1, busy / (right - left))));
        out.what.push(found.length);
        found.push({ kind, first, count, left, right, busy, place: lane.place });
      };
      for (const lane of lanes[kind]) {
        let run = null;
        for (let i = firstAfter(data, lane, from); i < lane.to && data.start[i] <= to; i++) {
          const left = data.start[i];
          const length = data.seconds[i];
          if (run && (length >= narrow || left - run.right >= narrow)) {
            put(lane, run.left, run.right, run.busy, run.first, run.count);
            run = null;
          }
          if (length >= narrow) {
            put(lane, left, left + length, length, i, 1);
          } else if (run) {
            run.right = left + length;
            run.busy += length;
            run.count += 1;
          } else {
            run = { left, right: left + length, busy: length, first: i, count: 1 };
          }
        }
        if (run) put(lane, run.left, run.right, run.busy, run.first, run.count);
      }
      out.when = out.what;
      return out;
    });
    return { found, drawn };
  }

  function describeBar(number, wanted) {
    const bar = described.found[number];
    const data = described.full[bar.kind].data;
    const kind = described.kinds[bar.kind];
    const where = described.titles[bar.place];
    if (wanted === "what") {
      if (bar.count > 1) return bar.count + " × " + kind + ", " + where;
      const name = described.names[data.name[bar.first]];
      return (name === kind ? kind : kind + " " + name) + ", " + where;
    }
    const span = "from " + seconds(bar.left) + " to " + seconds(bar.right);
    return seconds(bar.busy) + (bar.count > 1 ? " in all, " : ", ") + span;
  }

  /* The last sample at or before a time. */
  function sampleAt(data, time) {
    let low = 0;
    let high = data.start.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.start[middle] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function drawCurves({ plot, full, shown }) {
    const { start: from, end: to } = plot.x_range;
    // A curve has its first, lowest, highest and last point for each of so many columns.
    const column = (4 * full.length * (to - from)) / Math.min(MOST_POINTS, 2 * plot.inner_width * full.length);
    const xs = [];
    const ys = [];
    for (const { data } of full) {
      const x = [];
      const y = [];
      let i = sampleAt(data, from);
      while (i < data.start.length && data.start[i] <= to) {
        const begin = data.start[i];
        let low = i;
        let high = i;
        let next = i + 1;
        while (next < data.start.length && data.start[next] < begin + column) {
          if (data.bytes[next] < data.bytes[low]) low = next;
          if (data.bytes[next] > data.bytes[high]) high = next;
          next++;
        }
        if (x.length) {
          x.push(begin);
          y.push(y[y.length - 1]);
        }
        for (const k of [...new Set([i, Math.min(low, high), Math.max(low, high), next - 1])]) {
          x.push(begin);
          y.push(data.bytes[k]);
        }
        i = next;
      }
      if (x.length && i < data.start.length) {
        x.push(to);
        y.push(y[y.length - 1]);
      }
      xs.push(x);
      ys.push(y);
    }
    shown.data = { ...shown.data, xs, ys };
  }

  const describeMemory = (data, time) => bytes(data.bytes[sampleAt(data, time)]) + " at " + seconds(time);

  /* Copy the text that a button is for; pages opened from disk may lack the clipboard, which a selection has always. */
  async function copy(button) {
    const source = document.querySelector(button.dataset.copy);
    let copied = false;
    if (navigator.clipboard) {
      copied = await navigator.clipboard.writeText(source.textContent.trim()).then(() => true, () => false);
    }
    if (!copied) {
      getSelection().selectAllChildren(source);
      copied = document.execCommand("copy");
      if (copied) getSelection().removeAllRanges();
    }
    button.textContent = copied ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  /* Light and dark: the page follows the system until its switch is used. */
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => (dark() ? "dark" : "light");
  const dark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  function paint() {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    for (const doc of Bokeh.documents) {
      for (const model of doc.all_models) {
        if (model.type.endsWith("Axis")) {
          model.setv({
            axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line,
            major_tick_line_color: line, minor_tick_line_color: null,
          });
        } else if (model.type === "Grid" && model.grid_line_color !== null) {
          model.grid_line_color = line;
        } else if (model.type === "Legend") {
          model.label_text_color = ink;
        } else if (model.tags && model.tags.includes("ink")) {
          model.text_color = { value: ink };
        } else if (model.tags && model.tags[0] === "shade") {
          const colour = { value: model.tags[theme() === "dark" ? 2 : 1] };
          model.line_color = colour;
          if ("fill_color" in model) model.fill_color = colour;
        }
      }
    }
    document.querySelectorAll("[data-switch]").forEach((button) => {
      button.textContent = dark() ? "Light" : "Dark";
    });
    if (curves) curves.shown.data = { ...curves.shown.data, colour: curves.shades[theme()] };
    if (machine) showMachine();
  }

  function switchTheme() {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    paint();
  }

  /* The machine: nodes with their devices, or nodes alone where devices would be too small to point at. */
  const CELL = 24; // pixels of a device where there is room
  const SMALLEST = 9; // below this a node is one cell
  const TALLEST = 420; // of the picture
  let machine = null;
  let cells = [];
  let chosenLane = null;

  const byName = (name) => Bokeh.documents[0].get_model_by_name(name);

  /* Number in the plan of the device at a spot of the machine. */
  const numberOf = (spot) => machine.numbers[spot] ?? spot;

  /* Lane of a device; undefined if it does nothing. */
  const laneOf = (device) => machine.lanes.find(({ devices }) => devices[0] <= device && device < devices[1]);

  /* Its group by a role, its place in the group, and the size of the group. */
  function groupOf(device, role) {
    const lane = laneOf(device);
    if (!lane) return null;
    const along = machine.groups[role] || [];
    if (role === "pp") return { group: machine.lanes.indexOf(lane), place: 0, size: 1 };
    let [group, place, size] = [0, 0, 1];
    for (const [own, length, stride] of lane.axes) {
      const coordinate = Math.floor((device - lane.devices[0]) / stride) % length;
      if (along.includes(own)) [place, size] = [place * length + coordinate, size * length];
      else group = group * length + coordinate;
    }
    const before = machine.lanes.slice(0, machine.lanes.indexOf(lane));
    const groups = ({ devices, axes }) =>
      (devices[1] - devices[0]) / axes.filter(([own]) => along.includes(own)).reduce((all, [, length]) => all * length, 1);
    return { group: before.reduce((sum, each) => sum + groups(each), group), place, size };
  }

  function colourOf(device, role) {
    const found = groupOf(device, role);
    if (!found) return null;
    const [ordered, series] = [machine.ordered[theme()], machine.series[theme()]];
    return role === "pp" ? ordered[found.group] : series[found.group % series.length];
  }

  function describeDevice(spot, node) {
    const device = numberOf(spot);
    const lane = laneOf(device);
    const lines = ["GPU " + spot + ", node " + node + (device === spot ? "" : ", number " + device + " in the plan")];
    if (!lane) return [...lines, "does nothing"];
    lines.push(lane.title + " of " + machine.lanes.length);
    for (const role of Object.keys(machine.groups)) {
      const { group, place, size } = groupOf(device, role);
      if (size > 1) lines.push(role + " shard " + place + " of " + size + ", group " + group);
    }
    return lines;
  }

  function showMachine() {
    const plot = byName("machine");
    if (!(plot.inner_width > 0)) return; // drawn when its width is known
    const role = document.querySelector("#colour-choice").value;
    const width = Math.max(200, plot.inner_width);
    const nodes = machine.nodes.map((start, i) => ({ start, stop: machine.nodes[i + 1] ?? machine.count }));
    const most = Math.max(...nodes.map(({ start, stop }) => stop - start));
    const columns = Array.from({ length: most }, (_, i) => i + 1).find(
      (count) => most <= 4 ? count === most : most % count === 0 && count * count >= 1.5 * most,
    );
    const rows = Math.ceil(most / columns);
    let cell = CELL;
    const layout = () => {
      const across = Math.max(1, Math.floor(width / (cell * (columns + 0.6))));
      return { across, height: Math.ceil(nodes.length / across) * cell * (rows + 0.6) };
    };
    while (layout().height > TALLEST && cell > SMALLEST) cell -= 1;
    const whole = layout().height > TALLEST; // a node is one cell
    const across = whole ? Math.floor(width / SMALLEST) : layout().across;
    const size = whole ? SMALLEST : cell;
    const [wide, high] = whole ? [size, size] : [size * (columns + 0.6), size * (rows + 0.6)];
    cells = [];
    const frames = { x: [], y: [], width: [], height: [], label: [] };
    nodes.forEach(({ start, stop }, node) => {
      const left = (node % across) * wide;
      const top = Math.floor(node / across) * high;
      const devices = Array.from({ length: stop - start }, (_, i) => start + i);
      if (whole) {
        const colours = new Set(devices.map((spot) => colourOf(numberOf(spot), role)));
        const titles = [...new Set(devices.map((spot) => laneOf(numberOf(spot))?.title ?? "nothing"))];
        cells.push({
          x: left + size / 2, y: top + size / 2, side: size - 1.5, colour: colours.size === 1 ? [...colours][0] : null,
          lane: machine.lanes.indexOf(laneOf(numberOf(start))),
          lines: ["node " + node + ": GPUs " + start + "-" + (stop - 1), titles.join(", ")]
            .concat(colours.size === 1 ? [] : ["several " + role + " groups"]),
        });
        return;
      }
      const [inner, outer] = [size * columns, size * rows];
      frames.x.push(left + inner / 2 + 0.2 * size);
      frames.y.push(top + outer / 2 + 0.2 * size);
      frames.width.push(inner + 0.3 * size);
      frames.height.push(outer + 0.3 * size);
      frames.label.push(node);
      devices.forEach((device, i) => {
        cells.push({
          x: left + size * ((i % columns) + 0.7), y: top + size * (Math.floor(i / columns) + 0.7), side: size - 2,
          colour: colourOf(numberOf(device), role), lane: machine.lanes.indexOf(laneOf(numberOf(device))),
          lines: describeDevice(device, node), group: groupOf(numberOf(device), role)?.group,
        });
      });
    });
    const height = Math.ceil(nodes.length / across) * high + 4;
    plot.height = Math.ceil(height) + 10;
    plot.x_range.setv({ start: -1, end: width });
    plot.y_range.setv({ start: height, end: -2 });
    plot.renderers[0].data_source.data = frames;
    const several = cells.some(({ colour }) => colour === null);
    plot.renderers[1].data_source.data = {
      x: cells.map(({ x }) => x), y: cells.map(({ y }) => y),
      width: cells.map(({ side }) => side), height: cells.map(({ side }) => side),
      colour: cells.map(({ colour }) => colour ?? machine.plain),
      alpha: cells.map(({ lane, colour }) =>
        chosenLane !== null && lane !== chosenLane ? 0.15 : colour === null ? 0.45 : 1),
      detail: cells.map(({ lines }) => lines.map((text) => "<div>" + escaped(text) + "</div>").join("")),
    };
    const each = whole ? "Each square is a node" : "Each square is a GPU, each frame a node";
    const number = 1 + Math.max(0, ...cells.map(({ group }) => group ?? 0));
    const repeat = number > machine.series.light.length ? "; " + number + " groups share " + machine.series.light.length : "";
    const colours = role === "pp" ? "" : "; each " + role + " group has a colour" + (repeat && repeat + " colours");
    const grey = several ? (whole ? "; pale ones have several groups" : "; pale ones do nothing") : "";
    const click = machine.lanes.length > 1 ? " Click one to see only its " + machine.word + " in the charts." : "";
    document.querySelector("#machine-note").textContent = each + colours + grey + "." + click;
  }

  /* Show only one lane in the charts that have lanes; null for all. */
  function showLane(lane) {
    chosenLane = lane;
    const count = machine.lanes.length;
    for (const name of ["timeline", "time_shares", "memory_shares"]) {
      const plot = byName(name);
      if (plot) plot.y_range.setv(lane === null ? { start: count, end: 0 } : { start: lane + 1, end: lane });
    }
    const lines = byName("memory").renderers[0].data_source;
    lines.data = { ...lines.data, alpha: lines.data.alpha.map((_, i) => (lane === null || i === lane ? 1 : 0.12)) };
    const choice = document.querySelector("#lane-choice");
    if (choice) choice.value = lane === null ? "" : String(lane);
    showMachine();
    redraw();
  }

  /* A click on the machine: the lane of the device; the one that is shown already means all again. */
  function pick(x, y) {
    const found = cells.find((each) => Math.abs(each.x - x) <= each.side / 2 && Math.abs(each.y - y) <= each.side / 2);
    if (!found || found.lane < 0 || machine.lanes.length < 2) return;
    showLane(found.lane === chosenLane ? null : found.lane);
  }

  function readyMachine() {
    machine = JSON.parse(document.querySelector("#nodes").textContent);
    document.querySelector("#colour-choice").addEventListener("change", showMachine);
    const choice = document.querySelector("#lane-choice");
    if (choice) choice.addEventListener("change", () => showLane(choice.value === "" ? null : Number(choice.value)));
    onWidth("machine", showMachine);
  }

  /* The drawing and the table of the block and phase that are chosen. */
  function showBlock(graph) {
    const plot = Bokeh.documents[0].get_model_by_name("block");
    const widest = Math.max(1, ...graph.nodes.map((node) => Math.abs(node.column))) + 0.5; // at least three columns
    const rows = Math.max(...graph.nodes.map((node) => node.row)) + 1;
    const room = plot.inner_width / (2 * widest) - 12;
    const size = Math.max(7, Math.min(12, room / 9));
    const fit = (text) => {
      const most = Math.max(3, Math.floor(room / (0.6 * size)));
      return text.length > most ? text.slice(0, most - 1) + "…" : text;
    };
    const nodes = { x: [], y: [], colour: [], text: [], detail: [], width: [] };
    const edges = { x0: [], y0: [], x1: [], y1: [] };
    for (const node of graph.nodes) {
      nodes.x.push(node.column);
      nodes.y.push(node.row);
      nodes.colour.push(node.colour);
      nodes.text.push(fit(node.title) + "\n" + fit(node.placement));
      nodes.detail.push(detail(node));
      nodes.width.push(0.94);
      for (const i of node.reads) {
        const other = graph.nodes[i];
        edges.x0.push(other.column);
        edges.y0.push(other.row + 0.31);
        edges.x1.push(node.column);
        edges.y1.push(node.row - 0.31);
      }
    }
    plot.height = 70 + 52 * rows;
    plot.x_range.setv({ start: -widest, end: widest, reset_start: -widest, reset_end: widest });
    plot.y_range.setv({ start: rows - 0.5, end: -0.5, reset_start: rows - 0.5, reset_end: -0.5 });
    plot.renderers.find((each) => each.name === "labels").glyph.text_font_size = { value: size + "px" };
    plot.renderers[0].data_source.data = edges;
    plot.renderers[1].data_source.data = nodes;
    table(document.querySelector("#states"), ["parameter", ...graph.axes], graph.states);
    table(
      document.querySelector("#instructions"),
      ["#", "op", "name", "result on a device", "placement", "bytes", "time"],
      graph.nodes.map((node, i) => [
        i, node.title, node.name, node.shape, node.placement, bytes(node.bytes), seconds(node.seconds),
      ]),
    );
  }

  const element = (tag, text, name) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  };

  /* A shape with the mesh axes that split each dim, "4096 × 14336/tp"; axes on which it is a sum to be, behind it. */
  function shapeOf(tensor, axes) {
    const dims = tensor.whole.map(String);
    const terms = [];
    tensor.placements.forEach((placement, i) => {
      const split = /^S\((\d+)/.exec(placement);
      if (split) dims[Number(split[1])] += "/" + axes[i];
      else if (placement.startsWith("P")) terms.push(axes[i]);
    });
    return (dims.join(" × ") || "scalar") + (terms.length ? ", terms of a sum over " + terms.join(", ") : "");
  }

  function tensorCell(tensor, axes, name) {
    const cell = element("span");
    if (name) cell.append(element("b", name), " ");
    cell.append(shapeOf(tensor, axes));
    const same = String(tensor.whole) === String(tensor.local);
    cell.append(element("small", (same ? "" : tensor.local.join(" × ") + " on a GPU, ") + bytes(tensor.bytes)));
    return cell;
  }

  /* What all names of a block begin with, up to a dot. */
  function commonStart(names) {
    const parts = names.map((name) => name.split("."));
    let length = 0;
    while (parts.every((part) => part.length > length + 1 && part[length] === parts[0][length])) length++;
    return parts.length ? parts[0].slice(0, length).map((part) => part + ".").join("") : "";
  }

  /* The chosen block as rows: ops that take time with parameters and result, collectives as bands between them. */
  function showLayer(graph) {
    const holder = document.querySelector("#layer");
    const start = commonStart(graph.nodes.filter((node) => !node.over).map((node) => node.name));
    const short = (name) => (name.startsWith(start) ? name.slice(start.length) : name);
    const longest = Math.max(...graph.nodes.map((node) => node.seconds), 1e-12);
    const sums = new Map();
    const rows = [];
    let free = 0;
    let part = null;
    const flush = () => {
      if (free) rows[rows.length - 1].querySelector("small")?.append(" + " + free + (free === 1 ? " op" : " ops") + " without time");
      free = 0;
    };
    const columns = element("li", undefined, "columns");
    columns.append(...["alone", "op", "parameter", "result"].map((title) => element("span", title)));
    rows.push(columns);
    for (const node of graph.nodes) {
      const moves = node.over !== "" && node.kind !== "slice";
      const what = moves ? node.title : "compute";
      sums.set(what, (sums.get(what) ?? 0) + node.seconds);
      if (!moves && node.seconds === 0) {
        free += rows.length > 1;
        continue;
      }
      flush();
      const name = short(node.name);
      if (!moves) {
        const own = name.includes(".") ? name.split(".")[0] : null;
        if (own !== null && own !== part) rows.push(element("li", own, "part"));
        part = own ?? part;
      }
      const row = element("li", undefined, moves ? "move" : undefined);
      if (moves) {
        const size = graph.sizes[graph.axes.indexOf(node.over)];
        row.style.background = node.colour;
        row.append(
          element("b", node.kind + " over " + node.over + " (" + size + " GPUs)"), element("span", node.placement),
          element("span", bytes(node.bytes)), element("span", seconds(node.seconds) + (node.beside ? ", beside compute" : "")),
          element("span", name),
        );
      } else {
        const took = element("span", seconds(node.seconds), "took");
        const bar = element("i");
        bar.style.background = node.colour;
        bar.style.width = Math.max(1, (100 * node.seconds) / longest) + "%";
        took.append(bar);
        const op = element("span");
        op.append(element("b", node.kind), element("small", name));
        const read = element("span");
        read.append(...node.parameters.map((each) => tensorCell(each, graph.axes, short(each.name))));
        row.append(took, op, read, tensorCell(node.result, graph.axes));
      }
      rows.push(row);
      if (node.ring) {
        const size = graph.sizes[graph.axes.indexOf(node.ring)];
        const band = element("li", undefined, "move");
        band.style.background = node.ringColour;
        band.append(
          element("b", "ring over " + node.ring + " (" + size + " GPUs)"), element("span", "block to the next GPU, " + size + " steps"),
          element("span", bytes(node.passed) + " a step"), element("span", "beside the op above"), element("span", name),
        );
        rows.push(band);
      }
    }
    flush();
    holder.replaceChildren(...rows);
    const told = [...sums].filter(([, value]) => value > 0).map(([name, value]) => name + " " + seconds(value));
    const places = graph.axes
      .map((axis, i) => axis + (axis === graph.roles[i] ? " " : " (" + graph.roles[i] + ") ") + graph.sizes[i])
      .join(" × ");
    document.querySelector("#layer-sum").textContent =
      "On a mesh of " + (places || "one GPU") + ": " + told.join(", ") + "." + (start ? " Names begin with " + start : "");
  }

  const escaped = (text) => {
    const holder = document.createElement("span");
    holder.textContent = text;
    return holder.innerHTML;
  };

  const detail = (node) =>
    [node.title, node.name, "[" + node.shape + "]  " + node.placement, bytes(node.bytes) + ", " + seconds(node.seconds)]
      .concat(node.beside ? ["beside compute"] : [])
      .map((text) => "<div>" + escaped(text) + "</div>")
      .join("");

  function table(holder, header, rows) {
    const body = document.createElement("tbody");
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((cell) => (line.insertCell().textContent = cell));
    }
    const head = document.createElement("thead");
    const line = head.insertRow();
    for (const title of header) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      line.append(cell);
    }
    holder.replaceChildren(head, body);
  }

  /* What draws a chart anew when Bokeh has given it another width. */
  const drawers = {};
  const [ENTRY, LETTER] = [44, 6.6]; // pixels of an entry of a legend beside its label, and of a letter
  const BESIDE = 8; // pixels between a bar and its figure, and behind that

  function resized(name) {
    if (drawers[name]) drawers[name]();
    fit(byName(name));
  }

  function fit(plot) {
    if (!(plot.inner_width > 0)) return; // when its width is known
    fitLegend(plot);
    fitFigures(plot);
  }

  /* Put as many entries of a legend beside each other as the chart has room for. */
  function fitLegend(plot) {
    const legend = plot.below.find((each) => each.type === "Legend");
    if (!legend) return;
    const labels = legend.items.flatMap(({ label, renderers }) =>
      "field" in label ? renderers.flatMap((each) => [...each.data_source.data[label.field]]) : [label.value ?? label],
    );
    const longest = Math.max(...labels.map((label) => String(label).length));
    const columns = Math.floor(plot.inner_width / (ENTRY + LETTER * longest));
    legend.ncols = Math.max(1, Math.min(labels.length, columns));
  }

  /* End the axis of bars where the figures beside them have room, and no later. */
  function fitFigures(plot) {
    const written = plot.renderers.find(({ glyph }) => glyph.type === "Text" && glyph.tags.includes("ink"));
    if (!written) return;
    const { glyph, data_source } = written;
    const width = plot.inner_width;
    const ends = [...data_source.data[glyph.x.field]].map((right, i) => {
      const room = width - BESIDE - LETTER * data_source.data[glyph.text.field][i].length;
      return (right * width) / Math.max(room, width / 4);
    });
    plot.x_range.end = Math.max(...ends);
  }

  /* Call now, if the chart has been laid out, and whenever it gets another width. */
  function onWidth(name, show) {
    drawers[name] = once(show);
    if (byName(name).inner_width > 0) drawers[name]();
  }

  function ready(bars, memory) {
    curves = memory;
    const lanes = bars.full.map(lanesOf);
    redraw = once(() => {
      drawBars(bars, lanes);
      drawCurves(curves);
    });
    document.querySelectorAll("[data-switch]").forEach((button) => {
      button.hidden = false;
      button.addEventListener("click", switchTheme);
    });
    document.querySelectorAll("[data-copy]").forEach((button) => {
      button.hidden = false;
      button.addEventListener("click", () => copy(button));
    });
    system.addEventListener("change", paint);
    paint();
    if (matchMedia("(pointer: coarse)").matches) {
      // A finger scrolls the page; who wants to pan a chart takes its tool.
      for (const model of Bokeh.documents[0].all_models) if (model.type === "PanTool") model.active = false;
    }
    readyMachine();
    const choice = document.querySelector("#block-choice");
    if (choice) {
      const { graphs } = JSON.parse(document.querySelector("#blocks").textContent);
      const show = () => showBlock(graphs[Number(choice.value)]);
      choice.addEventListener("change", () => {
        showLayer(graphs[Number(choice.value)]);
        show();
      });
      showLayer(graphs[Number(choice.value)]);
      onWidth("block", show);
    }
    onWidth("timeline", redraw);
    for (const model of Bokeh.documents[0].all_models) if (model.type === "Figure") fit(model);
    document.documentElement.dataset.ready = "";
  }

  return { redraw: () => redraw(), seconds, bytes, count, percent, pick, resized, describeBar, describeMemory, ready };
})();
